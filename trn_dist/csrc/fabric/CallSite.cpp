#include "fabric/CallSite.h"

#include "fabric/ControlBlock.h"
#include "fabric/StagedBlock.h"
#include "fabric/SharedText.h"

#include <new>

namespace trn {

namespace {

using SiteText = SharedText<256>;

} // namespace

uint64_t intern_call_site(const std::string& text) {
  auto* block = new StagedBlock(sizeof(SiteText)); // never freed: peers may read it until the process ends
  auto* site = new (block->data()) SiteText();
  // The end of a long path says more than its beginning.
  constexpr size_t kLongest = sizeof(SiteText) - 1;
  site->store(text.size() > kLongest ? "..." + text.substr(text.size() - kLongest + 3) : text);
  return block->offset();
}

std::string call_site_text(const Fabric::Peer& peer, uint64_t site) {
  const bool fits = peer.base != nullptr && site % alignof(SiteText) == 0 && site <= peer.size &&
      sizeof(SiteText) <= peer.size - site;
  if (site == kNoOffset || !fits) {
    return "";
  }
  return " at " + reinterpret_cast<const SiteText*>(peer.base + site)->load();
}

} // namespace trn
