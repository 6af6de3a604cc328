"""What FP8 experts weigh at the real shape, and what loading them peaks at."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from drafttools.experts.layout import Layout
from drafttools.experts.memory import MIB, peak, resident

REAL = Layout(experts=512, hidden=2560, intermediate=640, tp_size=4)


def test_resident_bytes_of_a_rank_at_the_real_shape():
    weighs = resident(REAL)
    assert weighs["fp16"] == 1200 * MIB
    assert weighs["fp8_rows"] <= 606 * MIB
    assert weighs["fp8_blocks"] <= weighs["fp8_rows"]
    assert weighs["fp8_padded"] == 975 * MIB


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_no_rank_is_padded(tp):
    ranks = [Layout(4, 256, 640, tp, rank, blocks) for rank in range(tp) for blocks in (False, True)]
    for layout in ranks:
        shapes = layout.shapes()
        assert shapes["w13"][0].numel() + shapes["w2"][0].numel() == 4 * 256 * 3 * 640 // tp


@pytest.mark.slow
def test_the_peak_of_loading_online():
    layout = Layout(experts=64, hidden=1280, intermediate=640, tp_size=4)
    fp16, online = peak(layout, "fp16"), peak(layout, "online")
    dense = layout.fp16_bytes()
    assert abs(fp16 - dense) < 0.1 * dense  # the measure itself is right: FP16 experts weigh what they weigh
    assert online < 0.6 * fp16
    assert peak(layout, "fp16_then_fp8") > 1.4 * fp16


def test_command():
    shape = ["--experts", "8", "--hidden", "256", "--intermediate", "128", "--tp", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "drafttools.experts.memory", *shape], capture_output=True, text=True, check=True
    )
    shown = json.loads(done.stdout)
    assert shown["local"] == 64
    assert shown["resident"]["fp16"] == 8 * 3 * 64 * 256 * 2
    assert shown["resident"]["fp8_rows"] == 8 * (3 * 64 * 256 + 4 * (2 * 64 + 256))
