"""Muon: momentum whose matrices are made orthogonal, with AdamW for what is no matrix (Jordan et al. 2024).

The meaning of momentum, scales and coefficients is Megatron-LM's, which takes them from NVIDIA's Emerging-Optimizers
0.3. torch.optim.Muon has one set of coefficients for all steps, rounds before it normalizes, and has the host wait for
the learning rate; hence an engine of its own. Letters: R rows, C columns of a matrix.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_lite.config.args import OptimizerArgs

# Of the polynomial a x + b x^3 + c x^5, one row for each step; after the last one the first again.
# Source: emerging_optimizers/orthogonalized_optimizers/muon_utils.py, which names the papers.
COEFFICIENTS: Mapping[str, Sequence[tuple[float, float, float]]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
EPSILON = 1e-7  # below which a matrix is not normalized


class RowShare(Protocol):
    """The rows of a parameter that a rank has, where several share them out."""

    def gather(self, rows: Tensor) -> Tensor:
        """Gather all rows of a tensor of which each rank gives its own. Collective."""

    def take(self, whole: Tensor) -> Tensor:
        """Take this rank's rows of a whole tensor."""


@dataclass(frozen=True)
class Composition:
    """The matrices that a parameter is made of, each of which is made orthogonal by itself."""

    experts: int = 1  # matrices of as many rows each, one below the other
    fused: tuple[int, int, int] | None = None  # rows of queries, keys and values of a group; groups lie in this order
    share: RowShare | None = None  # None: this rank has all rows


UNSPLIT = Composition()


def orthogonalize(matrix_RC: Tensor, steps: int, coefficients: str, in_bf16: bool) -> Tensor:
    """Make the singular values of a matrix all about 1, by a Newton-Schulz iteration.

    Args:
        matrix_RC: The matrix, fp32 [R, C].
        steps: How many iterations.
        coefficients: A key of COEFFICIENTS.
        in_bf16: Whether matrices are rounded to bf16 before they are multiplied, as on tensor cores.

    Returns:
        fp32 [R, C], with about the same singular vectors.
    """
    is_tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    # the Gram matrix is of the smaller size
    x = matrix_RC.T if is_tall else matrix_RC
    x = x / x.norm().clamp(min=EPSILON)
    if in_bf16:
        x = x.bfloat16()
    for a, b, c in itertools.islice(itertools.cycle(COEFFICIENTS[coefficients]), steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    x = x.float()
    return x.T if is_tall else x


def compute_scale(rows: int, columns: int, mode: str) -> float:
    """The factor of an orthogonal update.

    Args:
        rows: Rows of the matrix, its outputs.
        columns: Columns of the matrix, its inputs.
        mode: The value of --muon-scale-mode.
    """
    ratio = rows / columns
    if mode == "spectral":
        squared: float = max(rows, columns)
    elif mode == "unit_rms_norm":
        squared = ratio
    else:  # shape_scaling
        squared = max(1, ratio)
    return float(squared**0.5)


class Muon(torch.optim.Optimizer):
    """Updates matrices. `grad_scale` and `found_inf` are those of torch's fused optimizers: scalars on the device."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        o: OptimizerArgs,
        lr: Tensor,
        compositions: Mapping[nn.Parameter, Composition],
    ):
        """
        Args:
            groups: Groups of matrices, each with its learning rate under "lr", an fp32 scalar on the device.
            o: The optimizer's flags.
            lr: The usual learning rate, an fp32 scalar on the device.
            compositions: Parameters that are more than one matrix, or of which this rank has some rows.
        """
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._o = o
        self._compositions = compositions
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all matrices, or none after an overflow; the host waits for nothing."""
        assert self.grad_scale is not None and self.found_inf is not None
        skipped = self.found_inf > 0
        for group in self.param_groups:
            keep = 1 - group["lr"] * group["weight_decay"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                # an overflow's NaN must not go into the momentum
                gradient = torch.where(skipped, 0.0, weight.grad / self.grad_scale)
                update = self._follow(weight, gradient, skipped)
                changed = weight * keep - group["lr"] * update
                weight.copy_(torch.where(skipped, weight, changed))

    def _follow(self, weight: Tensor, gradient: Tensor, skipped: Tensor) -> Tensor:
        """The direction that the momentum gives, orthogonal and scaled; the momentum takes the gradient in."""
        buffer: Tensor = self.state[weight]["momentum_buffer"]
        momentum = self._o.muon_momentum
        moved = buffer.lerp(gradient, 1 - momentum)
        buffer.copy_(torch.where(skipped, buffer, moved))
        direction = gradient.lerp(buffer, momentum) if self._o.muon_nesterov else buffer
        return self._orthogonalize(weight, direction)

    def _orthogonalize(self, weight: Tensor, direction_RC: Tensor) -> Tensor:
        """The scaled update of a parameter, made of its one matrix, or of each of its matrices.

        Args:
            weight: The parameter.
            direction_RC: The direction of its momentum, in its shape.
        """
        composition: Composition = self._compositions.get(weight, UNSPLIT)  # type: ignore[call-overload]
        if composition.share is None:
            return self._orthogonalize_parts(direction_RC, composition)
        # as on all ranks that have rows of it: a product takes less time than sending it
        whole_RC = composition.share.gather(direction_RC)
        update_RC = self._orthogonalize_parts(whole_RC, composition)
        return composition.share.take(update_RC)

    def _orthogonalize_parts(self, direction_RC: Tensor, composition: Composition) -> Tensor:
        """The scaled update of a parameter's matrices, all of whose rows are here."""
        if composition.experts > 1:
            of_experts = direction_RC.unflatten(0, (composition.experts, -1))
            updates = [self._scale_orthogonal(matrix) for matrix in of_experts]
            return torch.cat(updates)
        rows = composition.fused
        # as in Megatron-LM, a part that is no whole number of groups stays one matrix
        if rows is None or len(direction_RC) % sum(rows):
            return self._scale_orthogonal(direction_RC)
        groups = direction_RC.unflatten(0, (-1, sum(rows)))  # [groups, rows of a group, C]
        parts = []
        for part in groups.split(rows, dim=1):
            orthogonal = self._scale_orthogonal(part.flatten(0, 1))
            parts.append(orthogonal.unflatten(0, (len(groups), -1)))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def _scale_orthogonal(self, matrix_RC: Tensor) -> Tensor:
        """The scaled update of one matrix."""
        o = self._o
        orthogonal_RC = orthogonalize(
            matrix_RC,
            steps=o.muon_num_ns_steps,
            coefficients=o.muon_coefficient_type,
            in_bf16=o.muon_fp32_matmul_prec == "medium",
        )
        rows, columns = matrix_RC.shape
        scale = compute_scale(rows, columns, o.muon_scale_mode)
        return orthogonal_RC * (scale * o.muon_extra_scale_factor)


class Together(torch.optim.Optimizer):
    """Two engines that are called as one."""

    def __init__(self, engines: Sequence[torch.optim.Optimizer]):
        self.engines = engines
        self.param_groups = []
        self.state = defaultdict(dict)
        for engine in engines:
            self.param_groups += engine.param_groups
            self.state.update(engine.state)
        self.grad_scale: Tensor | None = None
        self.found_inf: Tensor | None = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Have both update their weights."""
        factors = {"grad_scale": self.grad_scale, "found_inf": self.found_inf}
        for engine in self.engines:
            for name, factor in factors.items():
                setattr(engine, name, factor)
            engine.step()
            for name in factors:
                setattr(engine, name, None)
