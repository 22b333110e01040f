"""Presets through the real TPU compiler, for slices that are not here: narrow, two layers of
each.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import jax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch import load_config
from maxbatch.around.compile.compiling import Compiled, largest_update
from maxbatch.cli import main
from maxbatch.commands.targets import plan_on, with_flags_of
from maxbatch.data.feed.placement import BatchShape
from maxbatch.parallel.mesh import lay_out, make_mesh
from maxbatch.run.compile.memory import compile_for, known_parts
from maxbatch.run.compile.target import Target, device_facts, find_target
from maxbatch.run.programs import Programs, checked_mesh_shape
from maxbatch.system.hardware.chips import TPUS, chip_of
from maxbatch.update.gradients import NEXT_TOKEN
from tests.helpers.tiny import UNMEASURED

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="the TPU compiler is not installed (pip install libtpu)",
    ),
]

# Narrow versions of the presets compile in seconds and have their form: groups of heads, tied or
# untied, dtypes, remat. With all heads of a preset a program takes twice as long to compile.
NARROW = (
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "base_num_decoder_layers=2",
    "base_emb_dim=256",
    "base_mlp_dim=512",
    "vocab_size=512",
    "max_target_length=256",
    "eval_interval=-1",
    "enable_checkpointing=false",
    UNMEASURED,  # test_every_chip.py compiles the noise
)
EXPERTS = ("decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2", "norm_topk_prob=true")


def update_for(topology: str, *keys: str) -> Compiled:
    """Returns the update of a narrow llama2-7b, or of `model_name`, compiled with the flags of the
    chip.
    """
    target = find_target(topology)
    stated = load_config(
        overrides=["model_name=llama2-7b", *NARROW, "per_device_batch_size=1", *keys]
    )
    config = with_flags_of(stated, target)
    return largest_update(config, target, plan_on(config, target))


def programs_for(target: Target, *keys: str) -> Programs:
    config = load_config(overrides=["model_name=llama2-7b", *NARROW, *keys])
    shape = checked_mesh_shape(config.plan, config.decoder, target.devices)
    return Programs(config.programs, target.devices, shape, NEXT_TOKEN)


@pytest.mark.parametrize(
    ("topology", "slices", "devices", "hosts"),
    [
        ("v4:2x2x1", 1, 4, 1),
        ("v4:4x4x4", 1, 64, 16),
        ("v5p:2x2x1", 1, 4, 1),
        ("v5p:4x4x4", 2, 128, 32),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x4", 1, 8, 2),
        ("v5e:16x16", 2, 512, 128),
        ("v6e:8x16", 1, 128, 32),
        ("tpu7x:2x2x1", 1, 8, 1),
        ("tpu7x:4x4x4", 1, 128, 16),
    ],
)
def test_devices_and_hosts_are_those_of_the_slice_that_is_sold(
    topology: str, slices: int, devices: int, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WRAP", "HOST_BOUNDS", "TPU_CHIPS_PER_HOST_BOUNDS"):
        # a value that ends the process once libtpu reads it
        monkeypatch.setenv(variable, "of something else")
    target = find_target(topology, slices)
    assert (len(target.devices), target.num_hosts) == (devices, hosts)
    assert device_facts(target.devices)["slices"] == slices
    assert target.chip is TPUS[topology.partition(":")[0]] is chip_of(target.devices[0].device_kind)


@pytest.mark.parametrize("axis", ["expert", "tensor"])
def test_an_axis_may_take_a_part_of_a_dimension_of_the_torus(axis: str) -> None:
    devices = find_target("v5p:4x4x4").devices
    keys = (f"ici_{axis}_parallelism=8", *EXPERTS, "base_num_query_heads=8", "base_num_kv_heads=8")
    assert dict(make_mesh(load_config(overrides=[*NARROW, *keys]), devices).shape)[axis] == 8


@pytest.mark.parametrize(
    "topology", ["v4:4x4x4", "v5e:16x16", "v5p:4x4x4", "v6e:16x16", "tpu7x:4x4x4"]
)
def test_weights_over_fsdp_are_gathered_not_summed(topology: str) -> None:
    """Without its links that wrap around, a cube gathers by an all-reduce of zero-padded whole
    arrays.
    """
    devices = find_target(topology).devices
    config = load_config(overrides=["model_name=llama2-7b", *NARROW])
    mesh = lay_out(checked_mesh_shape(config.plan, config.decoder, devices), devices)
    sharded, whole = (NamedSharding(mesh, P(axis)) for axis in ("fsdp", None))
    weights = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=sharded)
    text = jax.jit(lambda w: w * 2, out_shardings=whole).lower(weights).compile().as_text()
    assert re.search(r" all-gather(-start)?\(", text) and not re.search(
        r" all-reduce(-start)?\(", text
    )


@pytest.mark.parametrize(
    ("model", "topology", "keys"),
    [
        ("llama2-7b", "v5e:2x4", ("gradient_accumulation_steps=2",)),
        (
            "llama3-8b",
            "v5p:2x2x1",
            ("ici_tensor_parallelism=2", "base_num_query_heads=8", "base_num_kv_heads=2"),
        ),
        ("gpt2-124m", "v6e:2x2", ("ici_data_parallelism=2", "gradient_accumulation_steps=2")),
        (
            "llama3-70b",
            "tpu7x:2x2x1",
            ("ici_context_parallelism=2", "base_num_query_heads=16", "base_num_kv_heads=2"),
        ),
    ],
)
def test_presets_compile_on_their_meshes(
    model: str, topology: str, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    update = update_for(topology, f"model_name={model}", "per_device_batch_size=2", *keys)
    assert "maxbatch: warning" not in capsys.readouterr().err, (
        "the compiler takes the flags of the chip"
    )
    needed, available = update.verdict.needed_bytes, update.verdict.available_bytes
    assert needed and needed < TPUS[topology.partition(":")[0]].hbm_bytes == available
    assert load_config(overrides=[f"model_name={model}"]).scan_layers, (
        "one compiled layer, whatever the depth"
    )


def test_a_v4_compiles_a_wide_last_projection_with_its_own_flags(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sum inside of the product of its gradient would need 16.2 of the 16 MiB of a core's vector
    memory.
    """
    size = ("base_emb_dim=4096", "vocab_size=16000", "max_target_length=512", "remat_policy=full")
    few = ("base_num_decoder_layers=1", "base_num_query_heads=2", "base_num_kv_heads=2")
    assert update_for("v4:2x2x1", *size, *few).verdict.fits
    assert "maxbatch: warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("topology", "quantization", "eight_bits"),
    [("v6e:2x2", "int8", "s8"), ("tpu7x:2x2x1", "fp8", "f8e4m3fn")],
)
def test_products_and_gathers_of_weights_are_of_8_bits(
    topology: str, quantization: str, eight_bits: str
) -> None:
    layer = (
        "base_num_decoder_layers=1",
        "base_num_query_heads=2",
        "base_num_kv_heads=2",
        "scan_layers=false",
    )
    keys = (*layer, *EXPERTS, "ici_expert_parallelism=2", f"quantization={quantization}")
    update = update_for(topology, *keys).executable
    assert update
    program = update.as_text() or ""
    gather = r"\S* all-gather(?:-start)?\("
    gathered = re.findall(rf"= \(?(\w+)\[[\d,]*\]{gather}", program)
    assert gathered.count(eight_bits) > len(gathered) / 2, gathered
    sums = "s32" if quantization == "int8" else "f32"
    assert re.search(rf"= {sums}\[\S+ convolution\(", program) and f"{eight_bits}[" in program
    matrix = r"4,(?:256,512|512,256)"  # of the half of the experts that a device has
    of_experts = re.findall(rf"= \(?(\w+)\[{matrix}\]{gather}", program)
    assert of_experts and set(of_experts) == {eight_bits}


def test_accumulation_needs_hardly_more_memory_than_a_single_micro_batch() -> None:
    target = find_target("v5e:2x2")
    programs = programs_for(target, "base_num_decoder_layers=64")
    needed = [
        verdict.needed_bytes or 0
        for verdict in (
            compile_for(programs.step(BatchShape(4, number)), target)[0] for number in (1, 4)
        )
    ]
    gradients = known_parts(
        programs.abstract, programs.placement.abstract_batch(BatchShape(4, 1))
    ).gradients
    assert needed[1] - needed[0] < 0.5 * gradients, (
        "no gradients of a micro-batch beside their sums"
    )


def test_the_layers_backward_pass_keeps_no_whole_gradient_of_the_last_projection() -> None:
    target, words, width = find_target("v5e:2x4"), 1 << 15, 1024

    def temporaries(vocab_size: int) -> int:
        programs = programs_for(
            target, f"vocab_size={vocab_size}", f"base_emb_dim={width}", "remat_policy=full"
        )
        return programs.step(BatchShape(8, 2)).compile().memory_analysis().temp_size_in_bytes

    whole_gradient = 4 * width * words
    assert temporaries(words) - temporaries(512) < 2 * whole_gradient, (
        "the loss's own gradient, and no second time"
    )


def test_a_ramp_is_saved_for_a_slice_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    ramp = (
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=2",
        "per_device_batch_size=4",
        "global_rampup_samples=3750",
        "gradient_accumulation_steps=2",
        "steps=300",
    )
    arguments = [
        "model_name=llama2-7b",
        *NARROW,
        *ramp,
        "--topology",
        "v5p:2x2x2",
        "--output",
        "saved",
        "--hlo",
        "t",
    ]
    assert main(["compile", *arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["devices"]["devices"] == 8
    # The first stage's micro-batch divides the last one's, so its program runs both; the last has
    # its own as well.
    steps = {
        name: figures for name, figures in record["programs"].items() if name.startswith("step-")
    }
    assert set(steps) == {"step-16-4", "step-32-2"}
    assert all(figures["fits"] for figures in steps.values())
    for name, figures in steps.items():
        assert (
            figures["compute_cycles"] > 0
            and figures["kernel_cycles"] > 0
            and 0 < figures["modelled_mfu"] < 1
        )
        sent = figures["hidden_collective_bytes"] + figures["exposed_collective_bytes"]
        busy = (figures["compute_cycles"] + figures["kernel_cycles"]) / 1.75e9
        exposed = figures["exposed_collective_bytes"] / 600e9
        assert sent > 0 and figures["modelled_step_s"] >= busy + exposed - 1e-12
        assert len(figures["operations"]) == 5
        assert "is_scheduled=true" in Path(f"t/{name}.hlo").read_text()
    assert any(
        one["source"].startswith("maxbatch/model/") for one in steps["step-32-2"]["operations"]
    )
    manifest = json.loads(Path("saved/manifest.json").read_text())
    assert "--xla_enable_async_all_gather=true" in manifest["config"]["libtpu_flags"]
    assert manifest["shapes"] == [[16, 4], [32, 2]]
    assert all(Path(f"saved/{name}.bin").stat().st_size > 0 for name in manifest["programs"])


def test_too_large_a_batch_names_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "model_name=llama2-7b",
        *NARROW,
        "per_device_batch_size=16000",
        "--topology",
        "v5e:2x2",
    ]
    assert main(["compile", *arguments, "--output", "s", "--json"]) == 1
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["hbm_bytes_needed"] > record["hbm_bytes_available"] == TPUS["v5e"].hbm_bytes
    assert "does not fit v5e:2x2" in captured.err


def test_any_mesh_is_ranked_by_the_clock(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maxbatch.around.fit.choices.POLICIES", ("full",))  # the preset's own
    # 4 devices divide no heads
    few = ("base_num_decoder_layers=1", "base_num_query_heads=2", "base_num_kv_heads=2")
    keys = (
        "model_name=llama2-7b",
        *NARROW,
        *few,
        "global_batch_size=8",
        f"data_cache_dir={tmp_path / 'cache'}",
    )
    stated = (
        "ici_data_parallelism=1",
        "dcn_data_parallelism=2",
        "--topology",
        "v5e:2x2",
        "--slices",
        "2",
    )
    assert main(["fit", *keys, *stated, "--mesh", "auto", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    ways = answer["alternatives"]
    assert {way["ici_tensor_parallelism"] for way in ways} == {1, 2}
    assert {way["dcn_data_parallelism"] for way in ways} == {2}
    seconds = [way["modelled_step_s"] for way in ways]
    assert (
        answer["modelled_step_s"] == seconds[0] == min(seconds)
        and answer["ranked_by"] == "modelled_step_s"
    )
    assert "dcn_data_parallelism=2" in answer["mesh"].split()


SLICES = ("--topology", "v5e:2x2", "--slices", "3", "--survive", "1", "--json")
SURVIVING = (
    *NARROW,
    "base_num_decoder_layers=1",
    "dcn_data_parallelism=-1",
    "global_batch_size=24",
    "per_device_batch_size=1",
    "batch_padding=true",
    "steps=10",
)


def test_every_machine_that_survives_has_its_memory_its_modelled_step_and_its_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SURVIVING, *SLICES]) == 0
    rows = json.loads(capsys.readouterr().out)["survive"]
    assert [
        (row["slices"], row["devices"], row["gradient_accumulation_steps"]) for row in rows
    ] == [
        (3, 12, 2),
        (2, 8, 3),
    ]
    assert all(row["fits"] and row["modelled_step_s"] > 0 for row in rows)
    folder = tmp_path / "compiled"
    assert main(["compile", *SURVIVING, *SLICES, "--output", str(folder)]) == 0
    record = json.loads(capsys.readouterr().out)
    (smaller,) = record["survive"]
    assert [(one["devices"]["devices"], one["devices"]["slices"]) for one in (record, smaller)] == [
        (12, 3),
        (8, 2),
    ]
    assert [one["modelled_step_s"] for one in (record, smaller)] == [
        row["modelled_step_s"] for row in rows
    ]
    assert [one["hbm_bytes_needed"] for one in (record, smaller)] == [
        row["hbm_bytes_needed"] for row in rows
    ]
    assert (folder / "manifest.json").is_file() and smaller["output"] == str(
        folder / "slices-2-hosts-2-devices-8"
    )
    assert (folder / "slices-2-hosts-2-devices-8" / "manifest.json").is_file()


def test_fewer_hosts_than_a_slice_have_a_plan_and_no_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    topology = ("--topology", "v5e:2x4", "--survive", "1", "--json")
    assert main(["plan", *SURVIVING, "dcn_data_parallelism=1", *topology]) == 0
    whole, part = json.loads(capsys.readouterr().out)["survive"]
    assert whole["fits"] and (part["hosts"], part["devices"]) == (1, 4) and "fits" not in part
    assert main(["compile", *SURVIVING, *topology]) == 2
    assert (
        "--survive 1: counts slices of a topology here, and there is one" in capsys.readouterr().err
    )
