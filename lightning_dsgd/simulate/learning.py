"""What is learned while time is simulated: gradients at the versions the policy dictates.

A learner holds the newest parameters; a simulated worker keeps the ones it began with and asks for
the gradient there when it is done. So error against *simulated* time is a curve, in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_dsgd.simulate.theory import LossModel

Vector = Any
"""A learner's own parameters or gradient: an array, a tensor, or nothing."""
Floats = NDArray[np.float64]


class Learner(Protocol):
    """A problem, its optimizer and its newest parameters."""

    @property
    def parameters(self) -> Vector:
        """The newest parameters; never changed in place, so old ones stay what they were."""

    def gradient(self, worker: int, parameters: Vector) -> tuple[float, Vector]:
        """Loss and gradient of a mini-batch of this worker."""

    def update(self, parts: Sequence[Sequence[Vector]], ages: Sequence[int]) -> None:
        """One optimizer step on the mean of all gradients, given by contribution."""

    def error(self) -> float:
        """How far from done the newest parameters are."""


class _Descent:
    """SGD on a flat vector; what the problems below share."""

    def __init__(self, parameters: Floats, learning_rate: float, evaluate_every: int) -> None:
        self.parameters: Floats = parameters
        self.learning_rate = learning_rate
        self._every = max(1, evaluate_every)
        self._updates = 0
        self._error: float | None = None

    def update(self, parts: Sequence[Sequence[Vector]], ages: Sequence[int]) -> None:
        gradients = [gradient for part in parts for gradient in part]
        mean = sum(gradients[1:], gradients[0]) / len(gradients)
        self.parameters = self.parameters - self.learning_rate * mean
        self._updates += 1

    def error(self) -> float:
        if self._error is None or self._updates % self._every == 0:
            self._error = self.evaluate()
        return self._error

    def evaluate(self) -> float:
        raise NotImplementedError


class Quadratic(_Descent):
    """F(w) = ½ Σ aᵢ wᵢ² with noisy gradients: where theory is exact."""

    def __init__(
        self,
        size: int = 20,
        *,
        condition: float = 10.0,
        noise: float = 1.0,
        learning_rate: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__(np.ones(size), learning_rate, 1)
        self._curvature = np.geomspace(1.0 / condition, 1.0, size)
        self._noise = noise
        self._rng = np.random.default_rng(seed)

    def gradient(self, worker: int, parameters: Floats) -> tuple[float, Floats]:
        noise = self._noise * self._rng.standard_normal(parameters.size)
        return self._value(parameters), self._curvature * parameters + noise

    def evaluate(self) -> float:
        return self._value(self.parameters)

    def _value(self, parameters: Floats) -> float:
        return float(0.5 * np.sum(self._curvature * parameters**2))


class Logistic(_Descent):
    """Multinomial logistic regression on given data; the error is the loss on all of it."""

    def __init__(
        self,
        features: Floats,
        labels: NDArray[np.int64],
        *,
        batch: int = 32,
        learning_rate: float = 0.1,
        penalty: float = 1e-4,
        evaluate_every: int = 1,
        seed: int = 0,
    ) -> None:
        self._x = np.hstack([features, np.ones((len(features), 1))])
        self._y = labels
        self._classes = int(labels.max()) + 1
        size = self._x.shape[1] * self._classes
        super().__init__(np.zeros(size), learning_rate, evaluate_every)
        self._batch = batch
        self._penalty = penalty
        self._rng = np.random.default_rng(seed)

    def gradient(self, worker: int, parameters: Floats) -> tuple[float, Floats]:
        rows = self._rng.integers(len(self._x), size=self._batch)
        return self._slope(parameters, self._x[rows], self._y[rows])

    def full_gradient(self) -> Floats:
        """The gradient on all data at the newest parameters, to find the optimum with."""
        return self._slope(self.parameters, self._x, self._y)[1]

    def evaluate(self) -> float:
        return self._forward(self.parameters, self._x, self._y)[0]

    def _slope(self, flat: Floats, x: Floats, y: NDArray[np.int64]) -> tuple[float, Floats]:
        loss, by_score = self._forward(flat, x, y)
        gradient: Floats = (x.T @ by_score).ravel() + self._penalty * flat
        return loss, gradient

    def _forward(self, flat: Floats, x: Floats, y: NDArray[np.int64]) -> tuple[float, Floats]:
        """The mean loss, and its derivative by the scores."""
        scores = x @ flat.reshape(-1, self._classes)
        scores -= scores.max(axis=1, keepdims=True)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        picked = chances[np.arange(len(y)), y]
        loss = float(-np.log(np.maximum(picked, 1e-300)).mean())
        loss += 0.5 * self._penalty * float(flat @ flat)
        chances[np.arange(len(y)), y] -= 1.0
        return loss, chances / len(y)


class TorchModel:
    """Any small torch module with any loss on tensors that fit in memory."""

    def __init__(
        self,
        module: Any,
        loss: Callable[[Any, Any], Any],
        features: Any,
        labels: Any,
        *,
        batch: int = 32,
        learning_rate: float = 0.1,
        evaluate_every: int = 1,
        seed: int = 0,
    ) -> None:
        import torch

        self._module, self._loss = module, loss
        self._x, self._y = features, labels
        self._batch, self.learning_rate = batch, learning_rate
        self._every, self._updates = max(1, evaluate_every), 0
        self._random = torch.Generator().manual_seed(seed)
        self.parameters: Vector = {
            name: value.detach().clone() for name, value in module.named_parameters()
        }
        self._error = math.inf

    def gradient(self, worker: int, parameters: Vector) -> tuple[float, Vector]:
        import torch

        rows = torch.randint(len(self._x), (self._batch,), generator=self._random)
        leaves = {name: value.detach().requires_grad_() for name, value in parameters.items()}
        loss = self._value(leaves, self._x[rows], self._y[rows])
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        return float(loss.detach()), dict(zip(leaves, slopes, strict=True))

    def update(self, parts: Sequence[Sequence[Vector]], ages: Sequence[int]) -> None:
        gradients = [gradient for part in parts for gradient in part]
        step = self.learning_rate / len(gradients)
        self.parameters = {
            name: value - step * sum(gradient[name] for gradient in gradients)
            for name, value in self.parameters.items()
        }
        self._updates += 1

    def error(self) -> float:
        import torch

        if math.isinf(self._error) or self._updates % self._every == 0:
            with torch.no_grad():
                self._error = float(self._value(self.parameters, self._x, self._y))
        return self._error

    def _value(self, parameters: Vector, x: Any, y: Any) -> Any:
        import torch

        return self._loss(torch.func.functional_call(self._module, parameters, (x,)), y)


class Curve:
    """No problem at all, only its loss model: what a plan needs where K follows the loss."""

    def __init__(self, model: LossModel) -> None:
        self._model = model
        self._loss = model.start
        self.parameters: Vector = None

    def gradient(self, worker: int, parameters: Vector) -> tuple[float, Vector]:
        return self._loss, None

    def update(self, parts: Sequence[Sequence[Vector]], ages: Sequence[int]) -> None:
        gradients = sum(len(part) for part in parts)
        fresh = sum(age == 0 for age in ages) / len(ages)
        floor = self._model.floor(gradients, fresh)
        fall = self._model.rate * self._model.slowdown(fresh)
        self._loss = max(1e-12, self._loss - fall * (self._loss - floor))

    def error(self) -> float:
        return self._loss
