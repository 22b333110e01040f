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
