"""What ``import torch`` runs: registers the device ``neuron``, the module ``torch.neuron`` and the process group.

A leaf module: it imports torch only inside :func:`load`, which torch calls at the end of its own import. It creates no
memory, no thread and no socket, for launchers load it too.
"""


def load() -> None:
    """Registers the backend. PyTorch calls it through the entry point ``torch.backends``; a second call is harmless."""
    import torch

    if hasattr(torch, "neuron"):
        return
    torch.utils.rename_privateuse1_backend("neuron")
    from trn_dist import neuron
    from trn_dist.neuron.compile import install as install_compile_rules
    from trn_dist.neuron.debugger import install as install_debugger_pause
    from trn_dist.neuron.distributed import register_backend
    from trn_dist.neuron.replicas import install as install_replica_checks
    from trn_dist.neuron.upstream import correct_all
    from trn_dist.titan.upstream_patches import install_import_hook

    torch._register_device_module("neuron", neuron)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    register_backend()
    install_debugger_pause()
    install_replica_checks()
    correct_all()
    install_compile_rules()
    install_import_hook()
