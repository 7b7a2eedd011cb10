"""Loss-curve parity across layouts: prove that a layout trains the same model, or find the first tensor that differs.

The road of ``trn parity``, each step in the file of its name: ``layout`` (what is compared, as text, and as
TorchTitan overrides) → ``training`` (one run of one layout: its key in the cache, its process, its steps) →
``run_queue`` (many runs, as the host allows, with one progress display) → ``promise`` (what two layouts must have in
common: every bit, or all but rounding) → ``rounding`` (how far rounding alone can carry a curve) → ``verdict`` →
``report``. ``comparison`` walks it. Inside the ranks work ``cpu_reference`` (TorchTitan on CPU tensors, stand-alone)
and ``recorder`` (writes what passes through a model), whose files ``assemble`` puts together and ``divergence``
searches, with ``cause`` to name what it finds. Called by ``trn_dist.cli.parity`` and by the pytest plugin
``pytest_plugin``.
"""
