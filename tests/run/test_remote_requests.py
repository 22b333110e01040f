"""What a run asks of a store, counted at the proxy; `python -m benchmarks requests` counts more of
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.requests import (
    OBJECTS_OF_A_RESUME,
    READS_BESIDE_ROWS,
    ROWS,
    WRITES_A_MINUTE,
    objects_of_a_resume,
    prepare,
    reads_of_an_update,
)
from maxbatch.system.storage.appending import PERIOD_S
from maxbatch.system.storage.leases import LAPSE_S, RENEW_S
from tests.helpers.stores import Store


@pytest.mark.slow
def test_an_update_reads_a_range_for_each_row_and_a_resume_few_objects(
    store: Store, tmp_path: Path
) -> None:
    bucket = store.bucket()
    prepare(bucket, tmp_path)
    assert reads_of_an_update(store, bucket, "true", bar=ROWS + READS_BESIDE_ROWS).passed
    assert reads_of_an_update(store, bucket, "false", bar=ROWS / 2).passed, (
        "rows side by side are one range"
    )
    assert objects_of_a_resume(store, bucket).value <= OBJECTS_OF_A_RESUME


def test_metrics_and_lease_are_written_seldom_and_in_time() -> None:
    assert 60 / PERIOD_S + 60 / RENEW_S <= WRITES_A_MINUTE
    assert RENEW_S < LAPSE_S <= 30 and PERIOD_S <= 30
