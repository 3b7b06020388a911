"""PIER: its published priorities, and a draw through a buffer."""

import numpy as np
import pytest

from rllib_srl.contrib.pier import PIER
from rllib_srl.replay.selection.rules import Candidates
from tests.replay.groups import a_buffer, a_group

# weight = 1 makes c the normalised uncertainty: 0, .25, .5, .75, 1
GOLDEN = {1.0: [0, 0.4863, 0.7597, 0.9135, 1], 0.0: [2, 1.5137, 1.2403, 1.0865, 1], 0.5: [1] * 5}


def test_priorities_as_published():
    for pass_rate, golden in GOLDEN.items():
        candidates = Candidates(5, nll=[0, 0.5, 1, 1.5, 2], pass_rate=[pass_rate] * 5, visits=[1] * 5)
        np.testing.assert_allclose(np.exp(PIER(weight=1.0, alpha=1.0).log_weight(candidates)), golden, atol=5e-5)
    # Newest first in age: c = 1, .5, 0; r = -.5, 0, .5 by the pass rates .25, .5, .75: p = 1, 1, .5
    columns = {"pass_rate": [0.25, 0.5, 0.75], "visits": [1] * 3}
    log_weight_N = PIER(weight=0.0).log_weight(Candidates(3, **columns))
    assert log_weight_N.tolist() == pytest.approx(np.log([1.0, 1.0, 0.5**1.5]).tolist())
    buffer = a_buffer(reuse_selection="contrib.pier", reuse_selection_config={"weight": 0.0})
    buffer.add([a_group(i, 1, i) for i in range(3)], 1)
    assert len(buffer.draw_groups(3, 2)) == 3
