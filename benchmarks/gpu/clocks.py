"""offload's clock on the GPU against the wall clock, over a known amount of work."""

import time
from typing import Any

import torch

from benchmarks.gpu.place import Found, Place, expect
from offload.measure.steps import CudaClock, StepClock, StepMeter

MOST_DIFFERENCE = 0.05
WORK_S = 1.0  # long, compared with the launch of a kernel


def clocks(place: Place) -> Found:
    """CUDA events, and the step meter on top of them, measure the same seconds as the wall clock. Marks of work that still runs are
    unknown: nothing waits for them."""
    on_gpu = place.device == "cuda"
    clock = CudaClock(torch) if on_gpu else StepClock()
    size = place.pick(4096, 128)
    factors = torch.randn(2, size, size, device=place.device)

    def work(products: int) -> None:
        for _ in range(products):
            torch.mm(factors[0], factors[1])

    def timed(products: int) -> tuple[float, float, bool, Any]:
        meter = StepMeter(clock)
        _wait(place)
        began = time.perf_counter()
        meter.waited(0.0, 0.0, 1)
        start = clock.mark()
        work(products)
        end = clock.mark()
        unknown = clock.elapsed(start, end) is None
        meter.backward_done()
        meter.stepped()
        _wait(place)
        wall_s = time.perf_counter() - began
        elapsed_s = clock.elapsed(start, end)
        expect(elapsed_s is not None, "the clock's marks are still unknown after the device's work is done")
        assert elapsed_s is not None
        return wall_s, elapsed_s, unknown, meter.totals()

    timed(3)  # warm up
    once_s = timed(10)[0] / 10
    products = max(int(place.pick(WORK_S, 0.02) / once_s), 10)
    wall_s, elapsed_s, unknown, totals = timed(products)
    figures = {
        "work": f"{products} products of float32 matrices of {size} × {size}",
        "tflop_per_s": 2 * size**3 * products / wall_s / 1e12,
        "wall_s": wall_s,
        "clock_s": elapsed_s,
        "relative_difference": elapsed_s / wall_s - 1,
        "meter_relative_difference": totals.compute_s / wall_s - 1,
        "unknown_while_it_runs": unknown,
    }
    place.so_far(figures)
    if on_gpu:  # on a CPU both are the same clock
        for name in ("relative_difference", "meter_relative_difference"):
            expect(abs(figures[name]) < MOST_DIFFERENCE, f"{name} is {figures[name]:+.1%}, over {MOST_DIFFERENCE:.0%}")
        expect(unknown, "marks of work that still runs were known: the clock has waited for the device")
    return Found(said=f"clock {elapsed_s / wall_s - 1:+.2%} against the wall over {wall_s:.2f} s", figures=figures)


def _wait(place: Place) -> None:
    if place.device == "cuda":
        torch.cuda.synchronize()
