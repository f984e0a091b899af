"""Host side of the pipeline: shapes, buffers and launches, without a host read or a branch on values."""

from itertools import product
from typing import Any

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.kernels.rejection.block_stats import block_stats_kernel
from specflow.kernels.rejection.finish import finish_kernel
from specflow.kernels.rejection.masses import masses_kernel
from specflow.kernels.rejection.reject import reject_kernel
from specflow.kernels.rejection.workspace import (
    LaunchShape,
    Workspace,
    blocks_of,
    can_overlap,
    launch_shape,
    power_of_two,
)
from specflow.kernels.triton_choice import device_of


class RejectionPipeline:
    """`Sampler.verify` of rejection sampling by Triton kernels: same seeds, same tokens as the torch path.

    Static in everything but the buffers' contents, so a call can be captured as a CUDA graph; capture after one
    ordinary call of the same shape. Calls of one pipeline share their buffers and must stay on one stream.

    Logits that are not divided by the temperature yet (`VerifyInputs.scaled`) are divided inside, which saves their
    float32 copy.

    noise_dtype: float32 or float64 Gumbel noise. shape: of the launches; None chooses by the number of rows.
    """

    def __init__(self, *, noise_dtype: torch.dtype = torch.float32, shape: LaunchShape | None = None) -> None:
        self._noise_dtype, self._shape = noise_dtype, shape
        self.workspaces: dict[tuple[Any, ...], Workspace] = {}

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs, draft_slots: torch.Tensor | None = None) -> Verdict:
        """logits: [N, V] bf16, fp16 or fp32; inputs as documented, draft_logits of any such dtype.

        draft_slots: [B] int64, row of each request in draft_logits [slots, K, V]; None when it has B rows in order.
        A padded batch is one whose cu_rows is a multiple of K+1; rows behind num_drafts + 1 are not read.
        """
        return self._verify(logits, inputs, draft_slots, self._shape or launch_shape(logits.shape[0]))

    def warm_up(self, limits: EngineLimits, *, draft_laws: bool) -> None:
        """Compile every variant that an engine of these sizes can ask for, so that no step has to wait for one.

        They differ in K (0 in steps without drafts), all greedy or not, raw logits or processed ones in float32, and
        the launch shape. draft_laws: sampled drafts come with their laws. Compilations are cached on disk by triton.
        """
        most = limits.max_num_seqs * (limits.num_speculative_tokens + 1)
        shapes = {launch_shape(1), launch_shape(most)} if self._shape is None else {self._shape}
        widths = {0, limits.num_speculative_tokens}
        for shape, width, greedy in product(shapes, widths, (False, True)):
            for dtype, scaled in {(limits.dtype, greedy), (torch.float32, True)}:
                logits = torch.zeros(width + 1, limits.vocab_size, dtype=dtype, device=limits.device)
                inputs = _idle_inputs(width, limits, draft_laws and width > 0, greedy, scaled)
                self._verify(logits, inputs, None, shape)

    def _verify(
        self, logits: torch.Tensor, inputs: VerifyInputs, draft_slots: torch.Tensor | None, shape: LaunchShape
    ) -> Verdict:
        batch, width = inputs.draft_ids.shape
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        flat = torch.empty(batch * (width + 3), dtype=torch.int64, device=logits.device)
        tokens, emitted, accepted = flat.split([batch * (width + 1), batch, batch])
        verdict = Verdict(tokens.view(batch, width + 1), emitted, accepted)
        if batch:
            arguments = self._arguments(logits, inputs, draft_slots, verdict, shape)
            with device_of(logits):
                _launch(arguments, shape)
        return verdict

    def _workspace(
        self, batch: int, width: int, vocab_size: int, shape: LaunchShape, device: torch.device
    ) -> Workspace:
        key = (batch, width, vocab_size, shape, device)
        if key not in self.workspaces:
            self.workspaces[key] = Workspace(batch, width, vocab_size, shape, device)
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
        scale = not (inputs.scaled or inputs.all_greedy)
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
            "NP": space.parts,
            "NPP": power_of_two(space.parts),
            "NL": space.law_parts,
            "NC": space.chunks,
            "NCP": power_of_two(space.chunks),
            "BLOCK": shape.block,
            "PART": shape.part,
            "LAW_PART": shape.law_part,
            "CAP": torch.finfo(torch.float32 if scale else logits.dtype).max,
            "HAS_DRAFT": draft is not None,
            "ALL_GREEDY": inputs.all_greedy,
            "SCALE": scale,
            "FP64": self._noise_dtype == torch.float64,
            "FAST": logits.is_cuda and torch.version.hip is None,
            "EVICT": "evict_first" if shape.evict_first else "",
            "OVERLAP": shape.overlap and can_overlap(logits.device),
        }


def _idle_inputs(width: int, limits: EngineLimits, with_law: bool, greedy: bool, scaled: bool) -> VerifyInputs:
    """One request whose drafts are all placeholders."""
    ints = torch.zeros(1, dtype=torch.int64, device=limits.device)
    law = torch.zeros(1, width, limits.vocab_size, device=limits.device) if with_law else None
    return VerifyInputs(
        cu_rows=torch.tensor([0, width + 1], device=limits.device),
        draft_ids=torch.full((1, width), -1, device=limits.device),
        num_drafts=ints + width,
        positions=ints,
        temperature=torch.full((1,), 0.0 if greedy else 1.0, device=limits.device),
        seeds=ints,
        rounds=ints,
        draft_logits=law,
        all_greedy=greedy,
        scaled=scaled,
    )


def _launch(arguments: dict[str, Any], shape: LaunchShape) -> None:
    """Two kernels, or four where drafts were sampled."""
    batch, sampled = arguments["batch"], arguments["HAS_DRAFT"]
    blocks = blocks_of(arguments["V"], shape.block)
    rows = arguments["K"] + 1 + (arguments["K"] if sampled else 0)
    _run(block_stats_kernel, (blocks, rows, batch), arguments, shape.stats_warps)
    if sampled:
        _run(reject_kernel, (batch,), arguments, shape.judge_warps)
        _run(masses_kernel, (blocks, batch), arguments, shape.masses_warps)
    _run(finish_kernel, (batch,), arguments, shape.judge_warps if arguments["ALL_GREEDY"] else shape.finish_warps)


def _run(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], num_warps: int) -> None:
    """Launch with the parameters that the kernel names; each waits inside for what was launched before it."""
    early = {"launch_pdl": True} if arguments["OVERLAP"] else {}
    kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, num_warps=num_warps, **early)
