"""The same batch on the machines that are left when slices or hosts are lost."""

from __future__ import annotations

import json

import pytest

from maxbatch import load_config
from maxbatch.cli import main
from maxbatch.commands.surviving import survivors
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.survival import Machine, smaller_machines


def test_a_row_is_the_plan_of_a_run_on_that_machine() -> None:
    config = load_config(
        overrides=[
            "global_batch_size=1024",
            "per_device_batch_size=3",
            "batch_padding=true",
            "dcn_data_parallelism=-1",
        ]
    )
    for row in survivors(config, Machine(256, 64, 4), 3, None, None):
        machine, found = row.machine, row.to_dict()
        plan = BatchPlan.from_config(config, *machine[:2], num_slices=machine.num_slices)
        assert (found["slices"], found["hosts"], found["devices"]) == (
            machine.num_slices,
            machine.num_hosts,
            machine.num_devices,
        )
        assert all(
            found[name] == getattr(plan, name)
            for name in ("gradient_accumulation_steps", "padded_share")
        )
        assert found["global_batch_size_to_train_on"] == 1024, (
            "the batch is the same on every machine"
        )


def test_what_a_machine_loses_are_slices_and_hosts_where_there_is_one_slice() -> None:
    assert smaller_machines(Machine(256, 64, 4), 2) == [
        Machine(256, 64, 4),
        Machine(192, 48, 3),
        Machine(128, 32, 2),
    ]
    assert smaller_machines(Machine(256, 64, 4), 3)[-1] == Machine(64, 16, 1)
    assert smaller_machines(Machine(8, 4), 1) == [Machine(8, 4), Machine(6, 3)]


def test_plan_survive_has_a_row_for_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "global_batch_size=16", "--devices", "8", "--hosts", "4", "--survive", "2"]
    assert main([*arguments, "batch_padding=true", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["survive"]
    assert [(row["hosts"], row["devices"], row["padded_slots_per_step"]) for row in found] == [
        (4, 8, 0),
        (3, 6, 2),
        (2, 4, 0),
    ]
    assert found[1]["padded_share"] == 2 / 18
    assert not any("hbm_bytes_needed" in row for row in found)
    assert main([*arguments, "batch_padding=true"]) == 0
    assert "11.11%" in capsys.readouterr().out
    assert main(arguments) == 0, "the run itself is planned; a smaller machine refuses it"
    out = capsys.readouterr().out
    assert "refused on 3 hosts: global_batch_size=16: " in out and "batch_padding=true" in out


def test_a_batch_that_shrinks_with_the_machine_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["plan", "per_device_batch_size=2", "--devices", "4", "--hosts", "4", "--survive", "1"]
        )
        == 0
    )
    assert (
        "a smaller machine trains on a smaller batch; global_batch_size=8 keeps it"
        in capsys.readouterr().err
    )
