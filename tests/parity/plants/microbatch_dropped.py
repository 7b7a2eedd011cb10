"""The second microbatch of each step is not computed."""

from tests.parity.plants import trainer

upstream = trainer().forward_backward_step
calls = 0


def forward_backward_step(self, input_dict, labels):
    global calls
    calls += 1
    if calls % self.gradient_accumulation_steps == 0:
        return labels.new_zeros((), dtype=float).float()
    return upstream(self, input_dict, labels)


trainer().forward_backward_step = forward_backward_step
