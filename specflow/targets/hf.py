"""Target `hf`: any Hugging Face causal language model whose layers use the attention interface."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from transformers import PreTrainedModel

from specflow.checkpoints.weights_hash import weights_hash
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.limits import EngineLimits, PagedKernelsName
from specflow.errors import ConfigError, UnsupportedModelError
from specflow.kernels.paged_kernels import choose_paged_kernels, paged_kernels
from specflow.kernels.triton_choice import KernelChoice, check_kernels
from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps, Target, TargetFacts, TokenTables
from specflow.targets.fused_layers import fuse_layers
from specflow.targets.gpu_layers import GpuLayers, gpu_layers
from specflow.targets.loading import load_checkpoint
from specflow.targets.paged_layers import FusedLayers, PagedAttention
from specflow.targets.probe import LayerShape, probe_layers
from specflow.targets.proof import Proof, prove
from specflow.targets.taps import TapHooks
from specflow.targets.weight_layout import WeightLayout, lay_out_weights

if TYPE_CHECKING:
    from specflow.backends.base import Backend


ATTENTION = "target.attention"


@dataclass(kw_only=True)
class HfOptions:
    """Options of target `hf`. Raises `ConfigError` on construction without a path."""

    path: str = ""  # local folder, .gguf file or hub id
    revision: str | None = None  # branch, tag or commit on the hub
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto = the checkpoint's own
    tokenizer: str | None = None  # folder or hub id, when it is not beside the weights
    trust_remote_code: bool = False  # run Python code that comes with the checkpoint
    load_format: Literal["auto", "dummy"] = "auto"  # dummy = random weights, only config.json is needed
    prove: bool = True  # compare with the model's own code before the first step; fused layers are used only then
    weight_layout: Literal["auto", "native"] = "auto"  # auto = transposed and joined in memory where that is faster
    attention: KernelChoice = "auto"  # auto: Triton on a GPU where it is installed, else torch; proposers follow
    linears: Literal["auto", "torch"] = "auto"  # auto = own GPU kernels for few rows where they measured faster
    experts: str = "grouped_mm"  # how transformers computes experts: grouped_mm, batched_mm or eager

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("target hf needs a model: give target.path=FOLDER or target.path=OWNER/NAME.")
        check_kernels(self.attention, ATTENTION)


class HfTarget(Target):
    """A transformers model run on packed batches with the engine's attention.

    `model` is the transformers model itself. One engine at a time: attaching again replaces the pages and hooks of the
    engine before.
    """

    model: PreTrainedModel

    def __init__(self, options: HfOptions) -> None:
        self.options = options
        self._shapes: tuple[LayerShape, ...] = ()
        self._layout = WeightLayout(0, 0)
        self._fused: FusedLayers = ()
        self._refused = ""  # why fused layers that were there do not run
        self._attention: PagedAttention | None = None
        self._taps: TapHooks | None = None
        self._proof: Proof | None = None

    def load(self, backend: "Backend") -> None:
        """See `Target.load`; also finds out by one token what each layer stores."""
        kernels = choose_paged_kernels(self.options.attention, backend.device, ATTENTION)
        self.model, self.tokenizer = load_checkpoint(self.options, backend.device)
        self._shapes = probe_layers(self.model)
        digest = weights_hash(self.model.state_dict())
        if self.options.prove and self.options.weight_layout == "auto":  # never used without a proof
            self._fused = self._fuse(kernels)
        joined = isinstance(self._fused, GpuLayers)  # as the kernels read them
        self._layout = lay_out_weights(self.model, "native" if joined else self.options.weight_layout)
        self._selects_rows = facts.selects_rows(self.model)
        self.facts = self._facts(digest, kernels)

    def _fuse(self, kernels: PagedKernelsName) -> FusedLayers:
        """Layers in fewer launches; on a GPU by Triton, so only where that serves the pages as well."""
        if kernels != "triton":
            return fuse_layers(self.model, self._shapes)
        layers = gpu_layers(self.model, self._shapes)
        if layers is None:
            return ()
        if self.options.linears == "auto":
            layers.choose_linears()
        return layers

    def _facts(self, digest: str, kernels: PagedKernelsName) -> TargetFacts:
        config, model = facts.text_config(self.model), self.model
        highest = max(self.tokenizer.get_vocab().values(), default=-1) + 1
        values = sum(shape.kv_size for shape in self._shapes)
        positions, rope = facts.max_positions(config), facts.length_dependent_rope(config)
        return TargetFacts(
            name=Path(self.options.path).name,
            architecture=type(model).__name__,
            vocab_size=config.vocab_size,
            num_token_ids=min(highest, config.vocab_size),
            hidden_size=config.hidden_size,
            num_layers=len(self._shapes),
            max_model_len=positions if rope is None else min(positions, rope[1]),
            eos_token_ids=facts.eos_token_ids(model, self.tokenizer),
            dtype=model.dtype,
            num_parameters=model.num_parameters(),
            checkpoint_hash=digest,
            kv_bytes_per_token=values * model.dtype.itemsize,
            mask_token_id=self.tokenizer.mask_token_id,
            paged_kernels=kernels,
        )

    def attach(self, limits: EngineLimits, taps: Taps) -> None:
        """See `Target.attach`. Pages are per layer two tensors [num_blocks, block_size, Hkv, D].

        Raises `UnsupportedModelError` when the model follows a rule that packed attention cannot know,
        `ConfigError` for a tap on a layer that is not there or pages that do not fit into memory.
        """
        self.detach()
        self._check_rope(limits.max_model_len)
        if self.options.prove and self._proof is None:
            wanted = self._fused
            self._proof, self._fused = prove(self.model, self._shapes, wanted, self.facts.paged_kernels)
            self._refused = " (the fused ones gave other logits)" if wanted and not self._fused else ""
        self._taps = TapHooks(self.model, taps)
        try:
            self._attention = PagedAttention.for_engine(self._shapes, limits, self._fused)
        except ConfigError:
            self.detach()
            raise
        self._attention.enter(self.model)

    def _check_rope(self, max_model_len: int) -> None:
        rope = facts.length_dependent_rope(facts.text_config(self.model))
        if rope is not None and max_model_len > rope[1]:
            raise UnsupportedModelError(
                f"{self.facts.name} uses {rope[0]} rotary embeddings: past {rope[1]} positions a long request would "
                f"change the rotation of every other request in its batch. Set "
                f"scheduler.max_model_len={rope[1]} or less."
            )

    def detach(self) -> None:
        """Drop pages, hooks and the registered attention; the model then runs as transformers made it."""
        if self._taps is not None:
            self._taps.remove()
        if self._attention is not None:
            self._attention.leave(self.model)
        self._taps = self._attention = None

    def kv_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_blocks, block_size, Hkv, D] of a decoder layer, for drafters that read them."""
        assert self._attention is not None, "attach first"
        return self._attention.pages(self._shapes[layer].module)

    def token_tables(self) -> TokenTables:
        """See `Target.token_tables`. Weights as the model stores them."""
        tables = facts.token_tables(self.model)
        if isinstance(tables, str):
            raise UnsupportedModelError(f"{self.facts.name} cannot lend its tables to a drafting head: {tables}.")
        embedding, head = tables
        softcap = getattr(facts.text_config(self.model), "final_logit_softcapping", None)
        return TokenTables(embedding, head, softcap or None)

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """Run one packed batch; logits [N, V], taps [T, E], all valid until the next pass."""
        attention, taps = self._attention, self._taps
        assert attention is not None, "attach first"
        assert taps is not None
        attention.inputs = batch.attention
        some = len(batch.logit_rows) < len(batch.token_ids)
        rows = {"logits_to_keep": batch.logit_rows} if some and self._selects_rows else {}
        with torch.inference_mode():
            output = self.model(
                input_ids=batch.token_ids.unsqueeze(0),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                **rows,
            )
            logits = output.logits[0]
            if some and not rows:
                logits = logits[batch.logit_rows]
        return TargetOutput(logits=logits, hidden=dict(taps.hidden), last_hidden=taps.last_hidden)

    def describe(self) -> dict[str, str]:
        """What really ran."""
        model, known = self.model, self.facts
        return {
            "target": f"{known.name} ({known.architecture})",
            "parameters": f"{known.num_parameters:,}",
            "dtype": str(known.dtype).removeprefix("torch."),
            "quantisation": facts.quantisation(model) or "none",
            "weights": f"hash {known.checkpoint_hash}"
            + (" (random: load_format=dummy)" if self.options.load_format == "dummy" else ""),
            "weight layout": str(self._layout),
            "layers": "fused, joined weights" if self._fused else f"as transformers runs them{self._refused}",
            "products of few rows": str(self._fused.linears.choices) if isinstance(self._fused, GpuLayers) else "torch",
            "attention": f"paged, {paged_kernels(known.paged_kernels).name}",
            "attention proof": str(self._proof) if self._proof else "not run",
            "experts": facts.experts_implementation(model) or "none",
            "context": f"{known.max_model_len} tokens" + self._context_note(),
        }

    def _context_note(self) -> str:
        rope = facts.length_dependent_rope(facts.text_config(self.model))
        return "" if rope is None else f" ({rope[0]} rotary embeddings are batch-independent only so far)"
