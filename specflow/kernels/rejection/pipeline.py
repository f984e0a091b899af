"""Host side of the pipeline: shapes, buffers and launches, without a host read or a branch on values."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.rejection.block_stats import block_stats_kernel
from specflow.kernels.rejection.insert import insert_kernel
from specflow.kernels.rejection.reject import reject_kernel
from specflow.kernels.rejection.resample import resample_kernel
from specflow.kernels.rejection.workspace import LaunchShape, Workspace, launch_shape, power_of_two


class RejectionPipeline:
    """`Sampler.verify` of rejection sampling by Triton kernels: same seeds, same tokens as the torch path.

    Static in everything but the buffers' contents, so a call can be captured as a CUDA graph; capture after one
    ordinary call of the same shape. Calls of one pipeline share their buffers and must stay on one stream.

    noise_dtype: float32 or float64 Gumbel noise. scale: logits are raw and divided by the temperature inside, which
    saves the [N, V] float32 copy when no other option applies.
    """

    def __init__(
        self,
        *,
        noise_dtype: torch.dtype = torch.float32,
        scale: bool = False,
        shape: LaunchShape | None = None,
    ) -> None:
        self._noise_dtype, self._scale, self._shape = noise_dtype, scale, shape
        self.workspaces: dict[tuple[Any, ...], Workspace] = {}

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs, draft_slots: torch.Tensor | None = None) -> Verdict:
        """logits: [N, V] bf16, fp16 or fp32; inputs as documented, draft_logits of any such dtype.

        draft_slots: [B] int64, row of each request in draft_logits [slots, K, V]; None when it has B rows in order.
        A padded batch is one whose cu_rows is a multiple of K+1; rows behind num_drafts + 1 are not read.
        """
        batch, width = inputs.draft_ids.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        flat = torch.empty(batch * (width + 3), dtype=torch.int64, device=logits.device)
        tokens, emitted, accepted = flat.split([batch * (width + 1), batch, batch])
        verdict = Verdict(tokens.view(batch, width + 1), emitted, accepted)
        if batch:
            shape = self._shape or launch_shape(logits.shape[0])
            arguments = self._arguments(logits, inputs, draft_slots, verdict, shape)
            with _device_of(logits):
                _launch(arguments, shape)
        return verdict

    def _workspace(
        self, batch: int, width: int, vocab_size: int, shape: LaunchShape, device: torch.device
    ) -> Workspace:
        key = (batch, width, vocab_size, shape, device)
        if key not in self.workspaces:
            self.workspaces[key] = Workspace(batch, width, vocab_size, shape, self._noise_dtype, device)
        return self.workspaces[key]

    def _arguments(
        self,
        logits: torch.Tensor,
        inputs: VerifyInputs,
        draft_slots: torch.Tensor | None,
        verdict: Verdict,
        shape: LaunchShape,
    ) -> dict[str, Any]:
        """Everything any of the kernels asks for, by the name of its parameter."""
        batch, width = inputs.draft_ids.shape
        vocab_size = logits.shape[1]
        space = self._workspace(batch, width, vocab_size, shape, logits.device)
        draft = inputs.draft_logits if width and not inputs.all_greedy else None
        if draft is not None and draft.stride(2) != 1:
            draft = draft.contiguous()
        return {
            **{name: getattr(inputs, name) for name in ("cu_rows", "num_drafts", "positions", "temperature", "seeds")},
            **{name: getattr(verdict, name) for name in ("token_ids", "num_emitted", "num_accepted")},
            **space.tensors,
            "batch": batch,
            "logits": logits,
            "logits_stride": logits.stride(0),
            "draft_ids": inputs.draft_ids.contiguous() if width else inputs.num_drafts,
            "draft_logits": logits if draft is None else draft,
            "draft_slots": space.identity if draft_slots is None else draft_slots,
            "draft_stride_b": 0 if draft is None else draft.stride(0),
            "draft_stride_k": 0 if draft is None else draft.stride(1),
            "V": vocab_size,
            "K": width,
            "KP": power_of_two(width + 1),
            "NB": space.stats_blocks,
            "NBP": power_of_two(space.stats_blocks),
            "NS": space.sample_blocks,
            "NSP": power_of_two(space.sample_blocks),
            "STATS_BLOCK": shape.stats_block,
            "BLOCK": shape.sample_block,
            "WIDTH": shape.chunk,
            "CAP": torch.finfo(torch.float32 if self._scale else logits.dtype).max,
            "HAS_DRAFT": draft is not None,
            "ALL_GREEDY": inputs.all_greedy,
            "SCALE": self._scale and not inputs.all_greedy,
            "FP64": self._noise_dtype == torch.float64,
            "FAST": logits.is_cuda and torch.version.hip is None,
        }


def _device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int, **changed: Any) -> None:
    """Launch with the parameters that the kernel names."""
    named = {name: changed.get(name, arguments.get(name)) for name in kernel.arg_names}
    kernel[grid](**named, num_warps=num_warps)


def _launch(arguments: dict[str, Any], shape: LaunchShape) -> None:
    """One kernel per stage; a batch of greedy requests needs no resample."""
    batch, steps = arguments["batch"], arguments["K"] + 1
    grid = (arguments["NB"], steps, batch)
    _run(block_stats_kernel, grid, arguments, shape.stats_warps, BLOCK=shape.stats_block)
    _run(reject_kernel, (batch,), arguments, shape.small_warps)
    if not arguments["ALL_GREEDY"]:
        _run(resample_kernel, (arguments["NS"], batch), arguments, shape.sample_warps)
    _run(insert_kernel, (batch,), arguments, shape.small_warps)
