"""The place where a worker hangs, as a user reads it."""

from __future__ import annotations

import sys
import threading
import traceback

import pytest
import torch

from offload.train.worker.links.hang_watchdog import Watchdog


def test_of_a_call_into_torch_the_users_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = Watchdog(deadline_s=0.0)
    with pytest.raises(NotImplementedError) as raised:
        torch.nn.Module()(1)
    *_, (innermost, _) = traceback.walk_tb(raised.value.__traceback__)
    assert innermost.f_code.co_filename.startswith(torch.__path__[0])
    monkeypatch.setattr(sys, "_current_frames", lambda: {threading.get_ident(): innermost})
    assert str(watchdog.hung_at()).startswith(f"{__file__}:")
    with watchdog.waiting("ctx.report(loss)"):
        assert watchdog.hung_at() is None
