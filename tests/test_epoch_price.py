"""The benchmark of short epochs refuses what it cannot measure."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import epoch_price


@pytest.mark.parametrize("option", ["--repeats", "--epochs"])
def test_nothing_to_measure_is_refused_in_a_sentence(option: str) -> None:
    done = CliRunner().invoke(epoch_price.main, [option, "0"])
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': 0 is not in the range x>=1." in done.output
