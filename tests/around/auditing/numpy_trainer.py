"""A small trainer in NumPy, sound or with a fault that trainers have: the subject of the tests of
an audit.

A model of bigrams with one hidden layer, trained by descent, momentum or AdamW. A piece of a batch,
which is the rows of one device in one pass, gives the mean loss of its trained tokens and its
gradient, unless a fault says otherwise; `Trainer.step` puts the pieces together.

Shapes: B rows of a batch, L tokens in a row, D embedding, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from maxbatch.around.auditing.trainer import Batch, Layout

V, D = 8, 6
Params = dict[str, np.ndarray]
bfloat16 = ml_dtypes.bfloat16

# A fault, and the causes that an audit may give for it. None: no audit recognises it.
FAULTS: dict[str, set[str]] = {
    "mean of means": {"mean of means"},
    "sum": {"sum"},
    "last micro-batch": {"last micro-batch"},
    "last micro-batch's loss": {"last micro-batch"},
    "optimizer per micro-batch": {"optimizer per micro-batch"},
    "rows dropped": {"dropped rows"},
    "term as a mean": set(),
    "dropout": {"random numbers"},
    "a little dropout": {"random numbers"},
    "dropout by device": {"random numbers"},
    "dropout of features by device": {"random numbers"},
    "batch norm": set(),
    "running statistics": set(),
    "clipping per pass": set(),
    "clipping of every pass": set(),
    "decay per pass": set(),
    "rate per row": set(),
    "bf16 autocast": {"low precision"},
    "pure bf16": {"low precision"},
    "bf16 accumulators": {"low precision"},
    "state not saved": {"state not saved"},
    "mask ignored": {"mask ignored"},
    "padding trained on": {"mask ignored"},
    "mean over rows": set(),
    "padding counted": {"padding counted"},
    "0 / 0": set(),
    "clipping": set(),
    "large epsilon": set(),
    "bf16 loss": set(),
    "zero gradient": set(),  # of a parameter, in exact arithmetic: rounding noise
}


class Trainer:
    """A trainer on any number of devices.

    Args:
      layout: how a batch is cut; every pass is cut again among the devices.
      fault: "" or names of FAULTS, joined by " and ".
      optimizer: "sgd", "momentum" or "adamw".
      reports_loss: whether it reports its loss.
      seed: of the parameters.
    """

    def __init__(
        self,
        layout: Layout,
        fault: str = "",
        optimizer: str = "sgd",
        reports_loss: bool = True,
        seed: int = 0,
    ) -> None:
        self.layout, self.optimizer, self.reports_loss, self.seed = (
            layout,
            optimizer,
            reports_loss,
            seed,
        )
        self.faults = set(fault.split(" and ")) - {""}
        if unknown := self.faults - set(FAULTS):
            raise ValueError(f"no fault is called {unknown}")
        self.updates_begun = 0

    def init(self) -> Any:
        draw = np.random.default_rng(self.seed)
        shapes: dict[str, tuple[int, ...]] = {"table": (V, D), "out": (D, V), "bias": (V,)}
        if "zero gradient" in self.faults:
            shapes["shift"] = ()
        params = {
            name: np.asarray(draw.normal(0, 0.5, shape), np.float32)
            for name, shape in shapes.items()
        }
        if "pure bf16" in self.faults:
            params = {name: array.astype(bfloat16) for name, array in params.items()}
        zeros = {name: np.zeros_like(array) for name, array in params.items()}
        statistics = {"mean": np.zeros(D, np.float32), "variance": np.ones(D, np.float32)}
        return {"params": params, "m": zeros, "v": zeros, "updates": 0, "statistics": statistics}

    def params(self, state: Any) -> Params:
        if "running statistics" in self.faults:
            return state["params"] | state["statistics"]
        return dict(state["params"])

    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, float] | None]:
        pieces, metrics = self._pieces(batch), dict[str, float]()
        if "state not saved" in self.faults:
            state = state | {"updates": self.updates_begun}
            self.updates_begun += 1
        if "optimizer per micro-batch" in self.faults:
            losses = []
            for piece in pieces:
                loss, count, gradient, _ = self._mean(state["params"], piece, 0)
                if count:
                    state = self._updated(state, gradient)
                    losses.append(loss)
            return state, {"loss": float(np.mean(losses))}
        params, statistics = state["params"], state["statistics"]
        total = max(sum(self._weights(piece)[1] for piece in pieces), 1e-9)
        kind = bfloat16 if self.faults & {"bf16 accumulators", "pure bf16"} else np.float32
        sums, loss = {name: np.zeros(array.shape, kind) for name, array in params.items()}, 0.0
        for number, piece in enumerate(pieces):
            of_piece, count, gradient, seen = self._mean(params, piece, number)
            statistics = {name: 0.9 * statistics[name] + 0.1 * seen[name] for name in seen}
            is_last = number == len(pieces) - 1
            share = count / total
            if "mean of means" in self.faults:
                share = 1 / len(pieces)
            if "sum" in self.faults:
                share = 1.0
            if "last micro-batch" in self.faults:
                share = float(is_last)
            if "clipping per pass" in self.faults:
                gradient = _clipped(gradient)
            gradient = {name: (g * np.float32(share)).astype(kind) for name, g in gradient.items()}
            if "clipping of every pass" in self.faults:
                gradient = _clipped(gradient, 0.05)
            if "term as a mean" in self.faults:
                value, gradient["out"] = self._with_term(params, piece, gradient["out"])
                metrics["balance"] = metrics.get("balance", 0.0) + value
            sums = {name: (sums[name] + gradient[name]).astype(kind) for name in sums}
            if "decay per pass" in self.faults:
                sums = {name: (sums[name] + 0.01 * params[name]).astype(kind) for name in sums}
            loss += (
                float(is_last) if "last micro-batch's loss" in self.faults else share
            ) * of_piece
        if "clipping" in self.faults:
            sums = _clipped(sums)
        state = self._updated(state | {"statistics": statistics}, sums)
        metrics["loss"] = float(bfloat16(loss)) if "bf16 loss" in self.faults else float(loss)
        return state, metrics if self.reports_loss else None

    def _pieces(self, batch: Batch) -> list[Batch]:
        """Returns the rows of every device in every pass."""
        rows, per_pass, devices = (
            len(batch["tokens"]),
            self.layout.rows_per_pass,
            self.layout.num_devices,
        )
        if "rows dropped" in self.faults:
            rows -= rows % (self.layout.gradient_accumulation_steps * devices)
            per_pass = rows // self.layout.gradient_accumulation_steps
        bounds = []
        for start in range(0, rows, per_pass):
            edges = np.linspace(start, min(start + per_pass, rows), devices + 1).astype(int)
            bounds += [(a, b) for a, b in itertools.pairwise(edges) if a < b]
        return [{name: array[a:b] for name, array in batch.items()} for a, b in bounds]

    def _mean(
        self, params: Params, batch: Batch, number: int
    ) -> tuple[float, float, Params, Params]:
        """Returns the mean loss of the trained tokens of a piece, their number, the gradient, and
        batch statistics.
        """
        kind = bfloat16 if self.faults & {"bf16 autocast", "pure bf16"} else np.float32
        used = {name: array.astype(kind).astype(np.float32) for name, array in params.items()}
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        weights, count = self._weights(batch)
        scale = (
            np.float32(1 / max(count, 1e-9))
            if "0 / 0" not in self.faults
            else np.float32(1) / np.float32(count)
        )
        h_BxLxD = used["table"][inputs]
        keep = self._kept(h_BxLxD.shape, number)
        h_BxLxD = h_BxLxD * keep
        mean, variance = np.zeros(D, np.float32), np.ones(D, np.float32)
        if self.faults & {"batch norm", "running statistics"}:
            mean, variance = h_BxLxD.mean((0, 1)), h_BxLxD.var((0, 1))
        inverse = (
            1 / np.sqrt(variance + np.float32(1e-3))
            if "batch norm" in self.faults
            else np.ones(D, np.float32)
        )
        x_BxLxD = (h_BxLxD - mean) * inverse if "batch norm" in self.faults else h_BxLxD
        x_BxLxD = x_BxLxD.astype(kind).astype(np.float32)
        logits = (
            (x_BxLxD @ used["out"] + used["bias"] + used.get("shift", 0))
            .astype(kind)
            .astype(np.float32)
        )
        logits -= logits.max(-1, keepdims=True)
        chances = np.exp(logits)
        chances /= chances.sum(-1, keepdims=True)
        hit = np.take_along_axis(chances, targets[..., None], -1)[..., 0]
        with np.errstate(all="ignore"):
            by_logits = (
                (chances - np.eye(V, dtype=np.float32)[targets]) * weights[..., None] * scale
            )
            loss = float(-(np.log(hit) * weights).sum() * scale)
        by_logits = by_logits.astype(kind).astype(np.float32)
        by_x = (by_logits @ used["out"].T).astype(kind).astype(np.float32)
        if "batch norm" in self.faults:
            by_x = inverse * (by_x - by_x.mean((0, 1)) - x_BxLxD * (by_x * x_BxLxD).mean((0, 1)))
        table = np.zeros((V, D), np.float32)
        np.add.at(table, inputs, by_x * keep)
        gradient = {
            "table": table.astype(kind),
            "out": np.einsum("bld,blv->dv", x_BxLxD, by_logits).astype(kind),
            "bias": by_logits.sum((0, 1)).astype(kind),
            "shift": np.asarray(by_logits.sum()),
        }
        gradient = {name: gradient[name] for name in params}
        return (
            loss,
            count,
            gradient,
            {"mean": mean.astype(np.float32), "variance": variance.astype(np.float32)},
        )

    def _kept(self, shape: tuple[int, ...], number: int) -> np.ndarray:
        """Returns the factors by which dropout multiplies the inputs of the layer."""
        rates = {
            "dropout": 0.3,
            "a little dropout": 0.05,
            "dropout by device": 0.3,
            "dropout of features by device": 0.3,
        }
        rate = max((rates[fault] for fault in self.faults & rates.keys()), default=0.0)
        if "dropout by device" in self.faults or "dropout of features by device" in self.faults:
            number %= self.layout.num_devices
        drawn = np.random.default_rng(number).random(
            D if "dropout of features by device" in self.faults else shape
        )
        return ((drawn >= rate) / (1 - rate)).astype(np.float32)

    def _weights(self, batch: Batch) -> tuple[np.ndarray, float]:
        """Returns the weight of each token of a piece, and the number that their sum is
        divided by.
        """
        weights = batch["weights"][:, 1:].astype(np.float32)
        if "mask ignored" in self.faults:
            weights = np.ones_like(weights)
        if "padding trained on" in self.faults:
            weights = np.where(batch["segments"][:, 1:] == 0, np.float32(1), weights)
        count = float(weights.sum())
        if "mean over rows" in self.faults:
            of_row = weights.sum(1, keepdims=True)
            count = float(len(weights) if "padding counted" in self.faults else (of_row > 0).sum())
            weights = weights / np.maximum(of_row, 1)
        return weights, count

    def _with_term(
        self, params: Params, batch: Batch, gradient: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """Returns a mean over the trained tokens of a piece, and the gradient by the output with
        that of this term.
        """
        weights = batch["weights"][:, 1:]
        if not weights.any():
            return 0.0, gradient
        x_D = np.average(
            params["table"][batch["tokens"][:, :-1]].reshape(-1, D), 0, weights.ravel()
        )
        return float(0.1 * (x_D @ params["out"]).sum()), (gradient + 0.1 * x_D[:, None]).astype(
            gradient.dtype
        )

    def _updated(self, state: Any, gradient: Params) -> Any:
        params, kind = state["params"], state["params"]["out"].dtype
        t, rate = state["updates"] + 1, 0.1 / (1 + 0.2 * state["updates"])
        if "rate per row" in self.faults:
            rate *= self.layout.rows_per_pass / 4
        gradient = {name: g.astype(np.float32) for name, g in gradient.items()}
        m, v, steps = state["m"], state["v"], gradient
        if self.optimizer != "sgd":
            m = {
                name: (0.9 * m[name].astype(np.float32) + 0.1 * g).astype(kind)
                for name, g in gradient.items()
            }
            steps = {name: x.astype(np.float32) for name, x in m.items()}
        if self.optimizer == "adamw":
            rate *= 0.2
            v = {
                name: (0.99 * v[name].astype(np.float32) + 0.01 * g * g).astype(kind)
                for name, g in gradient.items()
            }
            eps = 1e-2 if "large epsilon" in self.faults else 1e-8
            steps = {
                name: m[name].astype(np.float32)
                / (1 - 0.9**t)
                / (np.sqrt(v[name].astype(np.float32) / (1 - 0.99**t)) + eps)
                + 0.01 * params[name].astype(np.float32)
                for name in gradient
            }
        new = {
            name: np.asarray(array.astype(np.float32) - np.float32(rate) * steps[name]).astype(kind)
            for name, array in params.items()
        }
        return state | {"params": new, "m": m, "v": v, "updates": t}


def _clipped(gradient: Params, most: float = 0.3) -> Params:
    norm = float(np.sqrt(sum((g.astype(np.float32) ** 2).sum() for g in gradient.values())))
    return {
        name: (g * np.float32(min(1.0, most / max(norm, 1e-9)))).astype(g.dtype)
        for name, g in gradient.items()
    }


def maker(
    fault: str = "", optimizer: str = "sgd", reports_loss: bool = True, seed: int = 0
) -> Callable[[Layout], Trainer]:
    """Returns a `make` of the trainer with these settings."""
    return lambda layout: Trainer(layout, fault, optimizer, reports_loss, seed)
