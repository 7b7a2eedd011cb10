"""The loss is divided by the number of targets less one a sequence, as if the last had none."""

from tests.parity.plants import wrap_spec


def wrap(build_loss):
    def build(*args, **kwargs):
        loss_fn = build_loss(*args, **kwargs)

        def loss(prediction, labels):
            length = labels.shape[1]
            return loss_fn(prediction, labels) * (length / (length - 1))

        return loss

    return build


wrap_spec(build_loss_fn=wrap)
