"""A trainer in plain NumPy, sound or with one of the faults that trainers had, each a few lines.

Shapes: B rows of a batch, L tokens in a row, D embedding, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from maxbatch.auditing.trainer import Batch, Layout

V, D = 8, 4
Params = dict[str, np.ndarray]


class Trainer:
    """A model of bigrams, trained by gradient descent or Adam.

    Args:
      layout: how a batch is cut; every micro-batch is cut again among the devices.
      optimizer: "sgd" or "adam".
      fault: one of those in test_audit.py, or "" for a sound trainer.
      dtype: of the parameters and the arithmetic.
      seed: of the parameters.
    """

    def __init__(
        self, layout: Layout, optimizer: str = "sgd", fault: str = "", dtype: Any = np.float32, seed: int = 0
    ) -> None:
        self.layout, self.optimizer, self.fault, self.dtype, self.seed = layout, optimizer, fault, dtype, seed
        self.updates_begun = 0

    def init(self) -> Any:
        draw = np.random.default_rng(self.seed)
        shapes = {"table": (V, D), "out": (D, V), "bias": (V,), "shift": ()}
        params = {name: np.asarray(draw.normal(0, 0.5, shape), self.dtype) for name, shape in shapes.items()}
        zeros = {name: np.zeros_like(array) for name, array in params.items()}
        return {"params": params, "m": zeros, "v": zeros, "updates": 0}

    def params(self, state: Any) -> Params:
        return dict(state["params"])

    def step(self, state: Any, batch: Batch) -> tuple[Any, dict[str, float]]:
        pieces = self._pieces(batch)
        params = state["params"]
        if self.fault == "resume one step off":
            state = state | {"updates": self.updates_begun}  # of this trainer, and not of the state
            self.updates_begun += 1
        if self.fault == "optimizer per micro-batch":
            losses = []
            for piece in pieces:
                loss, weight, gradient = self._sums(state["params"], piece, 0)
                if weight:
                    state = self._updated(state, {name: g / weight for name, g in gradient.items()})
                    losses.append(loss / weight)
            return state, {"loss": float(np.mean(losses))}
        total, count = 0.0, 0.0
        sums = {name: np.zeros_like(array) for name, array in params.items()}
        if self.fault == "bf16 accumulators":
            sums = {name: array.astype(ml_dtypes.bfloat16) for name, array in sums.items()}
        for number, piece in enumerate(pieces):
            loss, weight, gradient = self._sums(params, piece, number)
            if self.fault == "mean of means":
                loss, weight, gradient = loss / weight, 1.0, {name: g / weight for name, g in gradient.items()}
            if self.fault == "last micro-batch":
                total, count, sums = 0.0, 0.0, {name: np.zeros_like(g) for name, g in sums.items()}
            if self.fault == "last micro-batch's loss":
                total = loss * (sum(part["weights"][:, 1:].sum() for part in pieces) / weight if weight else 0)
            else:
                total += loss
            count += weight
            sums = {
                name: (sums[name] + g.astype(sums[name].dtype)).astype(sums[name].dtype) for name, g in gradient.items()
            }
        mean = {name: g.astype(self.dtype) / self.dtype(count) for name, g in sums.items()}
        metrics = {"loss": float(total / count)}
        if self.fault == "term as a mean":  # sums of token losses plus means of the term, over all tokens
            terms = [self._term(params, piece) for piece in pieces]
            for _, gradient in terms:
                mean["out"] = mean["out"] + gradient
            metrics["balance"] = float(sum(value for value, _ in terms))
        return self._updated(state, mean), metrics

    def _pieces(self, batch: Batch) -> list[Batch]:
        """Returns the rows of every device in every pass."""
        rows, per_pass = len(batch["tokens"]), self.layout.rows_per_pass
        if self.fault == "rows dropped":
            rows -= rows % (self.layout.gradient_accumulation_steps * self.layout.num_devices)
            per_pass = rows // self.layout.gradient_accumulation_steps
        bounds = []
        for start in range(0, rows, per_pass):
            stop = min(start + per_pass, rows)
            edges = np.linspace(start, stop, self.layout.num_devices + 1).astype(int)
            bounds += [(a, b) for a, b in itertools.pairwise(edges) if a < b]
        return [{name: array[a:b] for name, array in batch.items()} for a, b in bounds]

    def _sums(self, params: Params, batch: Batch, number: int) -> tuple[float, float, Params]:
        """Returns the sum of the token losses, of the weights, and the gradient of the former."""
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        weights = batch["weights"][:, 1:].astype(self.dtype)
        if self.fault == "weights ignored":
            weights = np.ones_like(weights)
        if self.fault == "padding trained on":
            weights = np.where(batch["segments"][:, 1:] == 0, self.dtype(1), weights)
        x_BxLxD = params["table"][inputs]
        keep = np.ones(D, self.dtype)
        if self.fault.startswith("dropout"):
            shape = D if "features" in self.fault else x_BxLxD.shape
            keep = (np.random.default_rng(number % self.layout.num_devices).random(shape) < 0.7).astype(self.dtype)
            x_BxLxD = x_BxLxD * keep
        logits = x_BxLxD @ params["out"] + params["bias"] + params["shift"]
        logits -= logits.max(-1, keepdims=True)
        chances = np.exp(logits)
        chances /= chances.sum(-1, keepdims=True)
        hit = np.take_along_axis(chances, targets[..., None], -1)[..., 0]
        by_logits = (chances - np.eye(V, dtype=self.dtype)[targets]) * weights[..., None]
        by_x = by_logits @ params["out"].T * keep
        table = np.zeros_like(params["table"])
        np.add.at(table, inputs, by_x)
        gradient = {
            "table": table,
            "out": np.einsum("bld,blv->dv", x_BxLxD, by_logits),
            "bias": by_logits.sum((0, 1)),
            "shift": np.asarray(by_logits.sum()),  # zero in exact arithmetic
        }
        return float(-(np.log(hit) * weights).sum()), float(weights.sum()), gradient

    def _term(self, params: Params, batch: Batch) -> tuple[float, np.ndarray]:
        """Returns a mean over the trained tokens of a micro-batch, and its gradient by the output."""
        weights = batch["weights"][:, 1:]
        if not weights.any():
            return 0.0, np.zeros_like(params["out"])
        x_D = np.average(params["table"][batch["tokens"][:, :-1]].reshape(-1, D), 0, weights.ravel())
        return float(0.1 * (x_D @ params["out"]).sum()), (0.1 * np.repeat(x_D[:, None], V, 1)).astype(self.dtype)

    def _updated(self, state: Any, gradient: Params) -> Any:
        t, rate = state["updates"] + 1, self.dtype(0.05 / (1 + 0.2 * state["updates"]))
        m, v, steps = state["m"], state["v"], gradient
        if self.optimizer == "adam":
            m = {name: self.dtype(0.9) * m[name] + self.dtype(0.1) * g for name, g in gradient.items()}
            v = {name: self.dtype(0.99) * v[name] + self.dtype(0.01) * g * g for name, g in gradient.items()}
            steps = {
                name: m[name] / self.dtype(1 - 0.9**t) / (np.sqrt(v[name] / self.dtype(1 - 0.99**t)) + self.dtype(1e-8))
                for name in gradient
            }
        params = {name: array - rate * steps[name] for name, array in state["params"].items()}
        return {"params": params, "m": m, "v": v, "updates": t}


def maker(**settings: Any) -> Callable[[Layout], Trainer]:
    """Returns a `make` of the trainer with these settings."""
    return lambda layout: Trainer(layout, **settings)
