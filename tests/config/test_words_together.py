"""Words that state a batch together: the settings after `works:` give the other framework's
batch.
"""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch.cli import main

LENGTH = 256  # max_target_length of base.yml
ROWS = 16  # per_device_batch_size of base.yml
HEADS = ("base_num_query_heads=12", "base_num_kv_heads=12")


class Machine(NamedTuple):
    """A batch on a machine elsewhere: replicas of tensor x context devices, each with `rows` in
    each of its passes.
    """

    replicas: int
    tensor: int
    context: int
    hosts: int
    rows: int
    passes: int

    @property
    def devices(self) -> int:
        return self.replicas * self.tensor * self.context

    @property
    def batch(self) -> int:
        return self.replicas * self.rows * self.passes


# What each word counts, from the documentation of its framework.
BATCH = {
    "train_batch_size": lambda m: m.batch,
    "effective_batch_size": lambda m: m.batch,
    "per_replica_batch_size": lambda m: m.rows * m.passes,
    "samples_per_node": lambda m: m.batch / m.hosts,
    "num_tokens_per_train_step": lambda m: m.batch * LENGTH,
}
PASS = {
    "micro_batch_size": lambda m: m.rows,
    "train_micro_batch_size_per_gpu": lambda m: m.rows,
    "per_device_train_batch_size": lambda m: m.rows,
    "images_per_gpu": lambda m: m.rows,
    "micro_batch_size_to_train_on": lambda m: m.rows * m.replicas,
    "rank_microbatch_size": lambda m: m.rows * LENGTH,
}
PASSES = {"accumulate_grad_batches": lambda m: m.passes, "gas": lambda m: m.passes}
SIZE = {
    "world_size": lambda m: m.devices,
    "nproc_per_node": lambda m: m.devices / m.hosts,
    "num_replicas": lambda m: m.replicas,
    "nodes": lambda m: m.hosts,
}
OF_NODE = ("samples_per_node", "nproc_per_node", "nodes")


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    replicas, tensor, context = (
        draw(st.integers(1, 6)),
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 2])),
    )
    devices = replicas * tensor * context
    hosts = draw(st.sampled_from([h for h in (1, 2, 3, 4) if devices % h == 0]))
    return Machine(
        replicas, tensor, context, hosts, draw(st.integers(1, 5)), draw(st.integers(1, 4))
    )


@st.composite
def spelled(draw: st.DrawFn, word: str, value: object) -> list[str]:
    """A word in a spelling that a shell gives."""
    dashed = "--" + word.replace("_", "-")
    forms = [
        [f"{word}={value}"],
        [dashed, f"{value}"],
        [f"{dashed}={value}"],
        [f"{word.replace('_', ' ')}={value}"],
    ]
    return draw(st.sampled_from(forms))


def run(line: Sequence[str]) -> tuple[int, str, str]:
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = main(["plan", *line])
    return code, out.getvalue(), error.getvalue()


@settings(max_examples=120)
@given(st.data(), machines(), st.booleans())
def test_words_and_a_machine_give_the_batch_that_they_give_there(
    data: st.DataObject, there: Machine, has_flags: bool
) -> None:
    counts = BATCH | PASS | PASSES | SIZE
    words = data.draw(
        st.lists(st.sampled_from(sorted(counts)), min_size=2, max_size=3, unique=True)
    )
    values = {word: counts[word](there) for word in words}
    if any(int(value) != value for value in values.values()):
        return  # a node would have a part of a sample
    axes = [
        f"ici_tensor_parallelism={there.tensor}",
        f"ici_context_parallelism={there.context}",
        *HEADS,
    ]
    flags = ["--devices", str(there.devices), "--hosts", str(there.hosts)] if has_flags else []
    typed = [
        part for word, value in values.items() for part in data.draw(spelled(word, int(value)))
    ]
    code, _, said = run([*typed, *axes, *flags])
    assert code == 2 and said.count("\n") == 1, said
    _, separator, works = said.rstrip().partition("; works: ")
    if not separator:
        is_all_of_the_machine = set(words) <= set(SIZE)  # nothing to state beside the flags
        assert not has_flags or is_all_of_the_machine, said
        return
    code, out, said = run([*shlex.split(works), *axes, *flags, "--json"])
    assert code == 0, f"{typed} {axes} {flags}: {works}\ndid not work: {said}"
    plan = json.loads(out)
    rows = there.rows * there.replicas if set(words) & set(PASS) else ROWS * plan["num_devices"]
    passes = there.passes if set(words) & set(PASSES) else 1
    if set(words) & set(BATCH):
        assert plan["global_batch_size_to_train_on"] == there.batch, works
    elif has_flags or plan["num_devices"] == there.devices:
        assert plan["global_batch_size_to_train_on"] == rows * passes, works
    if (
        set(words) & set(PASS)
        and plan["num_devices"] == there.devices
        and not (set(words) & set(BATCH))
    ):
        assert plan["micro_batch_size_to_train_on"] == rows, works
    if "world_size" in words and not has_flags:
        assert plan["num_devices"] == there.devices, works


@pytest.mark.parametrize(
    ("line", "works"),
    [
        (
            "per_replica_batch_size=64 micro_batch_size=16 --devices 4",
            "global_batch_size=256 per_device_batch_size=16",
        ),
        (
            "micro_batch_size=3 gradient_accumulation_steps=2 num_gpus=3",
            "per_device_batch_size=3 --devices 3",
        ),
        (
            "global_batch_to_load=128 per_device_batch_size=4 --devices 16 --hosts 4",
            "expansion_factor_real_data=2",
        ),
        (
            "train_micro_batch_size_per_gpu=16 ici_tensor_parallelism=2 --devices 8",
            "per_device_batch_size=8",
        ),
        ("samples_per_node=256 nnodes=2", "global_batch_size=512"),
        ("ngpus_per_node=4", "--devices 4"),
        ("nnodes=2 nproc_per_node=4", "--devices 8 --hosts 2"),
        ("'global batch size=256'", "global_batch_size=256"),
        ("'per replica batch size=64' --devices 4", "global_batch_size=256"),
        (
            "train_batch_size=256 train_micro_batch_size_per_gpu=16 gradient_accumulation_steps=4",
            "global_batch_size=256 per_device_batch_size=16 --devices 4",
        ),
        (
            "num_tokens_per_train_step=1048576 max_context_length=2048 "
            "num_tokens_per_microbatch_per_dp_rank=8192 --devices 8",
            "global_batch_size=1048576t max_target_length=2048 per_device_batch_size=4",
        ),
        (
            "--micro-batch-size 2 --global-batch-size 64 --tensor-model-parallel-size 2 --devices "
            "8",
            "per_device_batch_size=1 global_batch_size=64 ici_tensor_parallelism=2",
        ),
        (  # OLMo-core counts both in tokens
            "rank_microbatch_size=512 global_batch_size=4096",
            "global_batch_size=4096t per_device_batch_size=2",
        ),
        (
            "data_loader.global_batch_size=65536 sequence_length=512",
            "global_batch_size=65536t max_target_length=512",
        ),
        ("train_batch_size=2Mit", "global_batch_size=2Mit"),
        ("num_tokens_per_train_step=4096 train_batch_size=16", "global_batch_size=16"),
        (
            "device_batch_size=16 total_batch_size=524288 --devices 8",
            "per_device_batch_size=16 global_batch_size=524288t",
        ),
        ("max_steps=500 num_train_epochs=3", "steps=500"),
        (
            "train_batch_size=30 allow_nondivisible_batch_size=true --devices 8",
            "global_batch_size=30 batch_padding=true",
        ),
    ],
)
def test_hints_combine(line: str, works: str) -> None:
    code, _, said = run(shlex.split(line))
    assert code == 2 and said.endswith(f"; works: {works}\n"), said


@pytest.mark.parametrize(
    "line",
    [
        "train_batch_size=30 --devices 8",  # no framework gives 8 devices as many rows
        "train_batch_size=256 train_micro_batch_size_per_gpu=16 gas=4 --devices 8",  # 512
        "per_device_batch_size=4 per_device_train_batch_size=16",
        "num_replicas=4 per_replica_batch_size=8 --devices 2",
        "num_tokens_per_train_step=4096 train_batch_size=17",
    ],
)
def test_words_that_contradict_each_other_have_no_works(line: str) -> None:
    code, _, said = run(shlex.split(line))
    assert code == 2 and "works:" not in said, said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("zero_optimization.stage=3", "ici_fsdp_parallelism"),
        ("zero_optimization.offload_optimizer.device=cpu", "state stays on devices"),
        ("bf16.enabled=true", "dtype=bfloat16 weight_dtype=float32"),
        ("activation_checkpoint.mode=selective", "selective is minimal"),
        ("compile.enable=true", "every step is compiled"),
        ("validation.freq=500", "works: eval_interval=500"),
        (
            "checkpoint.interval=500 checkpoint.keep_latest_k=3",
            "checkpoint_period=500 max_num_checkpoints_to_keep=3",
        ),
        ("trainer.checkpointer.save_interval=10m", "a time there"),
    ],
)
def test_words_of_nested_files_are_answered_by_their_path(line: str, said: str) -> None:
    code, _, error = run(shlex.split(line))
    assert code == 2 and said in error, error


def test_the_short_flag_of_a_batch_names_its_meanings() -> None:
    for line in ("-b 256", "--batch-size=256", "--batch_size 256"):
        code, _, said = run([*shlex.split(line), "--devices", "8", "--hosts", "2"])
        assert code == 2 and "global_batch_size=512 (of each node)" in said, said


@pytest.mark.parametrize(
    ("stated", "rate"),
    [
        (["opt_type=sgd", "learning_rate=1e-3"], 1e-3 * ROWS * LENGTH),
        (
            ["opt_type=sgd", "learning_rate=1e-3", "gradient_accumulation_steps=2"],
            1e-3 * 2 * ROWS * LENGTH,
        ),
        (
            ["opt_type=sgd", "learning_rate=1e-3", "world_size=4", "global_batch_size=64"],
            1e-3 * 16 * LENGTH,
        ),
        (
            ["opt_type=sgd", "learning_rate=1e-3", "world_size=4", "per_replica_batch_size=8"],
            1e-3 * 8 * LENGTH,
        ),
        (["learning_rate=1e-3"], 1e-3),  # AdamW's step does not grow with the gradient
    ],
)
def test_a_sum_of_losses_is_answered_with_the_rate_of_the_mean_that_has_its_update(
    stated: list[str], rate: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "reduction=sum", *stated]) == 2
    works = shlex.split(capsys.readouterr().err.rpartition("works: ")[2])
    found = dict(word.split("=") for word in works if "=" in word)
    assert float(found.get("learning_rate", 1e-3)) == pytest.approx(rate)


@pytest.mark.parametrize("unknown", ["global_batch_size=64", "batch_size_schedule=0:64 100:128"])
def test_a_sum_of_losses_has_a_formula_where_the_tokens_of_a_rank_are_unknown(
    unknown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "reduction=sum", "opt_type=sgd", unknown]) == 2
    said = capsys.readouterr().err
    assert "learning_rate x tokens per update / ranks" in said and "works" not in said
