"""Every dimension of every family's parameters has its place on a mesh."""

from __future__ import annotations

import jax
import pytest

from maxbatch import load_config
from maxbatch.families.matrices import NORMS, TABLES
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import activation_constraint, parameter_spec
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.plan.partition import PARAMETER_RULES


@pytest.mark.parametrize("family", TABLES)
def test_every_matrix_has_a_place_as_a_parameter_and_gathered_for_sampling(family: str) -> None:
    mesh = make_mesh(load_config(), jax.devices()[:1])
    constrain = activation_constraint(mesh, BATCH_AXES)
    for row in TABLES[family]:
        assert set(row.axes) <= PARAMETER_RULES.keys(), row
        if not set(NORMS) & set(row.axes):  # which sampling leaves where they are
            assert len(constrain.spec((4,) * len(row.axes), row.axes)) == len(row.axes)


def test_experts_split_over_their_axis_and_other_matrices_over_it_by_width() -> None:
    keys = ["model_name=tiny-moe", "ici_expert_parallelism=4", "ici_fsdp_parallelism=2"]
    mesh = make_mesh(load_config(overrides=keys), jax.devices()[:8])
    assert parameter_spec(("layers", "experts", "embed", "moe_mlp"), (2, 8, 64, 96), mesh)[1:3] == (
        "expert",
        "fsdp",
    )
    assert parameter_spec(("layers", "embed", "mlp"), (2, 64, 96), mesh)[1] == ("fsdp", "expert")


def test_parameters_are_split_over_devices_that_share_rows_but_not_beside_a_pipeline() -> None:
    def width_over(*keys: str) -> tuple[str, ...] | str | None:
        mesh = make_mesh(load_config(overrides=[*keys]), jax.devices()[:8])
        spec = parameter_spec(("layers", "embed", "mlp"), (2, 64, 96), mesh)
        return spec[1]  # type: ignore[no-any-return]

    context = "ici_context_parallelism=4"
    assert width_over(context) == ("fsdp", "context")
    assert width_over(context, "ici_pipeline_parallelism=2", "ici_fsdp_parallelism=1") == "fsdp"
