#!/bin/bash
# Builds the extension with a sanitizer in build/ADDRESS_OR_THREAD, a copy of this tree, and runs the tests of the process
# group there:
#
#   tests/sanitize/run.sh address|thread PYTHON [arguments of pytest]
#
# Only our code is instrumented: Python and torch are not, so the runtime is preloaded, and what thread.txt names is left
# out. Fails when a sanitizer reports anything, also in a rank whose test passed.
set -eu
sanitizer=$1
python=$(realpath --no-symlinks "$2")
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
tree=$root/build/sanitize-$sanitizer
reports=$tree/reports
mkdir -p "$tree"
(cd "$root" && git ls-files -z --cached --others --exclude-standard | grep -zv '^benchmarks/' |
  xargs -0 cp --parents --update --target-directory "$tree")
rm -rf "$reports" && mkdir "$reports"
cd "$tree"
TORCH_DEVICE_BACKEND_AUTOLOAD=0 TRN_BUILD_SANITIZER=$sanitizer "$python" setup.py --quiet build_ext --inplace >build.log 2>&1 ||
  { grep -E 'error' build.log | head -n 20 >&2; exit 1; }

case $sanitizer in
  address)
    runtime=$(g++ -print-file-name=libasan.so)
    # Python keeps what it allocates until the process ends, and torch's libraries define each other's symbols.
    export ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0:log_path=$reports/report"
    # With the library of C++ beside it, or it finds no __cxa_throw: Python does not load that library, torch does later.
    set -- env LD_PRELOAD="$runtime $(g++ -print-file-name=libstdc++.so)" "$python" -m pytest "$@"
    ;;
  thread)
    runtime=$(g++ -print-file-name=libtsan.so)
    export TSAN_OPTIONS="suppressions=$tree/tests/sanitize/thread.txt:ignore_noninstrumented_modules=1:exitcode=0:report_thread_leaks=0:report_signal_unsafe=0:die_after_fork=0:log_path=$reports/report"
    # The runtime does not know the address layouts of newer kernels.
    set -- setarch -R env LD_PRELOAD="$runtime" "$python" -m pytest "$@"
    ;;
esac
status=0
"$@" || status=$?
if [ -n "$(ls "$reports")" ]; then
  echo "$(ls "$reports" | wc -l) reports of the $sanitizer sanitizer in $reports:" >&2
  cat "$reports"/* | grep -E '^SUMMARY' | sort | uniq -c | sort -rn | head -n 20 >&2
  exit 1
fi
[ $status = 0 ] && echo "the $sanitizer sanitizer reports nothing"
exit $status
