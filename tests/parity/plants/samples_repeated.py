"""Every data-parallel rank reads the samples of rank 0."""

from tests.parity.plants import wrap_spec


def wrap(build_dataloader):
    return lambda **kwargs: build_dataloader(**{**kwargs, "dp_rank": 0})


wrap_spec(build_dataloader_fn=wrap)
