"""The data-parallel ranks read each other's samples."""

from tests.parity.plants import wrap_spec


def wrap(build_dataloader):
    def build(dp_world_size, dp_rank, *args, **kwargs):
        return build_dataloader(dp_world_size, dp_world_size - 1 - dp_rank, *args, **kwargs)

    return lambda **kwargs: build(kwargs.pop("dp_world_size"), kwargs.pop("dp_rank"), **kwargs)


wrap_spec(build_dataloader_fn=wrap)
