"""The predicted step in a run's metrics: what a rank writes, how ranks are joined, what a person sees."""

import json

import pytest
import torch  # noqa: F401  (a rank has imported it when it asks for its times)

from trn_dist.timing import GroupTimes, StepTimes
from trn_dist.titan.metrics import Prediction, merge_step, predicted_line
from trn_dist.titan.progress import show_parts, show_prediction, show_step


def times(host_bound_ps: int = 0) -> StepTimes:
    return StepTimes(
        start_ps=0,
        end_ps=2_000_000_000 + host_bound_ps,
        engines={"tensor": 1_000_000_000, "vector": 400_000_000},
        launch_ps=100_000_000,
        host_bound_ps=host_bound_ps,
        idle_ps=0,
        groups=(GroupTimes("mesh_tp", 300_000_000, 200_000_000, 500_000_000, 4, 1 << 20),),
        operators=(),
        hbm_bound_ps=0,
        flops=1e11,
        hbm_bytes=0,
    )


def line(rank: int, host_bound_ps: int = 0) -> dict:
    return {
        "step": 3,
        "loss": 1.5,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "step_time_s": 0.25,
        "hbm_reserved_peak_bytes": rank,
        "hbm_active_peak_bytes": rank,
        "predicted": predicted_line(times(host_bound_ps), steps=1, tokens=512, flops_per_token=1e8, peak_flops=158e12),
    }


def test_a_ranks_line_uses_torchtitans_definition_of_utilisation() -> None:
    found = predicted_line(times(), steps=2, tokens=512, flops_per_token=1e8, peak_flops=158e12)
    assert found["step_time_s"] == pytest.approx(1e-3)
    assert found["tokens_per_s_per_core"] == pytest.approx(512 / 2e-3)
    # As in torchtitan.components.metrics: 100 * FLOPs a token * tokens a second / peak.
    assert found["mfu_percent"] == pytest.approx(100 * 1e8 * (512 / 2e-3) / 158e12)
    assert found["hfu_percent"] == pytest.approx(100 * (1e11 / 2e-3) / 158e12)
    assert sum(found["parts_ps"].values()) == found["time_ps"] == 2_000_000_000
    assert json.loads(json.dumps(found)) == found


def test_ranks_are_joined_by_the_slowest() -> None:
    step = merge_step([line(0), line(1, host_bound_ps=500_000_000), line(2), line(3)], tokens_per_step=2048)
    predicted = step.predicted
    assert predicted is not None
    assert predicted.rank == 1
    assert predicted.step_time_s == pytest.approx(2.5e-3)
    assert sum(predicted.parts_s.values()) == pytest.approx(predicted.step_time_s)
    # Four ranks are one chip.
    assert predicted.tokens_per_s_per_chip == pytest.approx(2048 / 2.5e-3)
    assert json.loads(step.as_json())["predicted"]["parts_s"]["waiting.mesh_tp"] == pytest.approx(2e-4)


def test_in_timing_mode_a_line_is_of_the_first_rank_of_a_stage() -> None:
    step = merge_step([line(0), line(4, host_bound_ps=500_000_000)], tokens_per_step=2048, ranks_each=4)
    assert step.predicted is not None
    assert (step.predicted.rank, step.hbm_peak_rank) == (4, 4)


def test_lines_without_a_prediction_are_joined_without_one() -> None:
    lines = [{key: value for key, value in line(rank).items() if key != "predicted"} for rank in range(2)]
    step = merge_step(lines, tokens_per_step=2048)
    assert step.predicted is None
    assert "predicted" not in show_step(step, 10)


def test_what_a_person_sees() -> None:
    predicted = Prediction("trn2.48xlarge", 2.5e-3, 819_200.0, 1.234, 2.0, {"a": 1e-3, "b": 1.495e-3, "c": 5e-6}, 1, "")
    assert show_prediction(predicted) == "trn2.48xlarge predicted: 2.5 ms a step, 819,200 tokens/s/chip, MFU 1.23 %"
    assert show_parts(predicted) == "b 59.8 %, a 40.0 %"
