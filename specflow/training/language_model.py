"""Training a small causal language model on source code, alone or as the draft of a target."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from specflow.errors import ConfigError
from specflow.training.distillation import divergence, greedy_agreement, write_target_text
from specflow.training.parallel_drafting import (
    Objective,
    ParallelObjective,
    find_mask_token,
    mark_parallel,
    parallel_agreement,
)
from specflow.training.pretrain_options import PretrainOptions, PretrainResult, Progress
from specflow.training.token_data import Corpus, WindowSampler, encode, even_windows, join_rows, read_corpus
from specflow.zoo.bundle import resolve
from specflow.zoo.tokenizer import save_tokenizer, train_tokenizer

__all__ = ["PretrainOptions", "PretrainResult", "Progress", "pretrain"]

OnProgress = Callable[[Progress], None]
_EVALUATION_WINDOWS = 16


def pretrain(options: PretrainOptions, on_progress: OnProgress | None = None) -> PretrainResult:
    """Train a model, save it to `options.output` (bfloat16 safetensors, Hugging Face format) and measure it.

    on_progress: called every `log_every` steps and at every measurement on held-out text.
    Raises ConfigError for impossible options, an unusable corpus, a missing GPU or a target of another vocabulary.
    """
    _prepare(options)
    corpus = read_corpus(options.corpus_root)
    tokenizer = _tokenizer(options, corpus)
    teacher = _teacher(options, len(tokenizer))
    training = encode(tokenizer, corpus.training.texts).to(options.where)
    held_out = encode(tokenizer, corpus.held_out.texts).to(options.where)
    texts = [training, *_target_texts(options, teacher, training, tokenizer.eos_token_id)]
    model, loss_of = build_model(options, tokenizer), _objective(options, tokenizer)
    run = _Run(options, model, teacher, texts, held_out, loss_of, on_progress)
    run.train()
    run.restore_best()
    loss = held_out_loss(run.model, held_out, options.sequence_length)
    if options.parallel_drafts:
        mark_parallel(run.model.config, find_mask_token(tokenizer), options.parallel_drafts)
    save_model(run.model, tokenizer, options.output)
    return PretrainResult(
        output=options.output,
        parameters=sum(weight.numel() for weight in run.model.parameters()),
        training_files=len(corpus.training.texts),
        undecodable_files=corpus.training.undecodable + corpus.held_out.undecodable,
        training_tokens=len(training),
        held_out_tokens=len(held_out),
        target_text_tokens=sum(len(text) for text in texts[1:]),
        tokens_seen=options.steps * options.tokens_per_step,
        seconds=run.seconds,
        train_loss=run.train_loss,
        best_step=run.best_step,
        held_out_loss=loss,
        held_out_bits_per_byte=loss * len(held_out) / corpus.held_out.total_bytes / math.log(2),
        agreement=_agreement(options, run.model, teacher, held_out, tokenizer.eos_token_id),
        history=run.history,
        agreement_by_draft=_agreement_by_draft(options, run.model, teacher, held_out, tokenizer),
    )


def build_model(options: PretrainOptions, tokenizer: Any) -> Qwen3ForCausalLM:
    """A float32 model of the options' sizes on `options.where`; weights drawn from `options.seed`, or those of
    `initialise_from`. ConfigError when that has other sizes."""
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.max_positions,
        tie_word_embeddings=True,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    if options.initialise_from is not None:
        _copy_weights(options.initialise_from, model)
    return model.to(options.where)


def _copy_weights(source: str, model: Qwen3ForCausalLM) -> None:
    weights = AutoModelForCausalLM.from_pretrained(resolve(source), dtype=torch.float32).state_dict()
    wanted = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ConfigError(
                f"initialise_from={source} has other sizes than the model to train: {name} is "
                f"{found.get(name, 'missing')} there and {wanted.get(name, 'missing')} here; "
                "set the sizes of the task to those of that model"
            )
    model.load_state_dict(weights)


def add_dropout(model: Qwen3ForCausalLM, share: float) -> None:
    """Drop a share of what the embedding and every block add to the residual stream, in training mode only.

    Done by hooks, since Qwen3 has no such setting: neither the configuration nor the names of the weights change.
    """

    def drop(module: torch.nn.Module, _: Any, output: Tensor) -> Tensor:
        return F.dropout(output, share, module.training)

    if share > 0:
        blocks = [part for layer in model.model.layers for part in (layer.self_attn.o_proj, layer.mlp.down_proj)]
        for part in (model.model.embed_tokens, *blocks):
            part.register_forward_hook(drop)


def save_model(model: Any, tokenizer: Any, folder: str) -> None:
    """Write weights as bfloat16, the configuration and the tokenizer. Rounds the weights of `model`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    original = model.dtype
    model.to(torch.bfloat16).save_pretrained(folder)
    model.to(original)
    save_tokenizer(tokenizer, folder)


@torch.no_grad()
def held_out_loss(
    model: Any, tokens: Tensor, length: int, teacher: Any = None, share: float = 0.0, loss_of: Objective | None = None
) -> float:
    """Mean loss in nats per token over windows side by side.

    tokens: int32 [tokens] on the model's device; length: tokens per window.
    With a teacher, `share` of the loss is the divergence from it, as in training. loss_of: None is `objective`.
    """
    loss_of = loss_of or objective
    windows = even_windows(tokens, min(length + 1, len(tokens)))
    losses = [loss_of(model, teacher, part, share) * len(part) for part in windows.split(_EVALUATION_WINDOWS)]
    return (torch.stack(losses).sum() / len(windows)).item()


def objective(model: Any, teacher: Any, windows: Tensor, share: float) -> Tensor:
    """Cross-entropy of the next token, mixed with the divergence from a teacher if there is one; a scalar.

    windows: int64 [count, length + 1]; every token but the first is predicted.
    """
    inputs, expected = windows[:, :-1], windows[:, 1:]
    logits = model(input_ids=inputs, use_cache=False).logits
    entropy = F.cross_entropy(logits.float().flatten(0, 1), expected.flatten())
    if teacher is None:
        return entropy
    with torch.no_grad():
        wanted = teacher(input_ids=inputs, use_cache=False).logits
    return (1 - share) * entropy + share * divergence(logits, wanted)


class _Run:
    """The state of one training run: weights, optimizer, best weights so far and what was measured."""

    def __init__(
        self,
        options: PretrainOptions,
        model: Qwen3ForCausalLM,
        teacher: Any,
        texts: list[Tensor],
        held_out: Tensor,
        loss_of: Objective,
        on_progress: OnProgress | None,
    ) -> None:
        self.options, self.model, self.teacher, self.held_out = options, model, teacher, held_out
        self.sampler = WindowSampler(texts, options.seed)
        add_dropout(model, options.dropout)
        self.optimizer = _optimizer(options, model)
        self.objective = loss_of
        self.training_objective = torch.compile(loss_of) if options.compile and loss_of is objective else loss_of
        self.on_progress = on_progress or (lambda progress: None)
        self.history: list[tuple[int, float]] = []
        self.best: dict[str, Tensor] = {}
        self.best_step, self.best_loss = 0, math.inf
        self.train_loss = math.nan
        self.seconds = 0.0

    def train(self) -> None:
        """All steps, with measurements in between and after the last."""
        started = time.perf_counter()
        paused = 0.0
        for step in range(1, self.options.steps + 1):
            loss = self._step(step)
            last = step == self.options.steps
            measure = last or step % self.options.evaluate_every == 0
            if not measure and step % self.options.log_every:
                continue
            self.train_loss = loss.item()
            self.seconds = time.perf_counter() - started - paused
            held_out = self._measure(step) if measure else None
            paused = time.perf_counter() - started - self.seconds
            self.on_progress(self._progress(step, held_out))

    def restore_best(self) -> None:
        """Load the best weights, rounded to bfloat16 as they are saved, so that what is measured is what is kept."""
        self.model.load_state_dict({name: weight.bfloat16().float() for name, weight in self.best.items()})
        self.model.eval()

    def _step(self, step: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, step)
        windows = self.sampler.batch(self.options.batch_windows, self.options.sequence_length + 1)
        self.model.train()
        with _precision(self.options):
            loss = self.training_objective(self.model, self.teacher, windows, self.options.distill_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _measure(self, step: int) -> float:
        self.model.eval()
        with _precision(self.options):
            loss = held_out_loss(
                self.model,
                self.held_out,
                self.options.sequence_length,
                self.teacher,
                self.options.distill_weight,
                self.objective,
            )
        self.history.append((step, loss))
        if loss < self.best_loss or not self.best:
            self.best_step, self.best_loss = step, loss
            self.best = {name: weight.detach().clone() for name, weight in self.model.state_dict().items()}
        return loss

    def _progress(self, step: int, held_out: float | None) -> Progress:
        speed = step * self.options.tokens_per_step / max(self.seconds, 1e-9)
        rate = learning_rate(self.options, step)
        return Progress(step, self.options.steps, self.train_loss, rate, speed, held_out)


def learning_rate(options: PretrainOptions, step: int) -> float:
    """Rate of a step (from 1): linear warm-up, then a cosine fall to `final_rate_fraction` of the peak."""
    if step <= options.warmup_steps:
        return options.learning_rate * step / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    fraction = options.final_rate_fraction
    return options.learning_rate * (fraction + (1 - fraction) * (1 + math.cos(math.pi * done)) / 2)


def _optimizer(options: PretrainOptions, model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas, fused=options.where == "cuda")


@contextmanager
def _precision(options: PretrainOptions) -> Iterator[None]:
    with torch.autocast(options.where, dtype=torch.bfloat16, enabled=options.bf16):
        yield


def _prepare(options: PretrainOptions) -> None:
    if options.where == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU; use device cpu with smaller settings")
    if options.threads:
        torch.set_num_threads(options.threads)


def _tokenizer(options: PretrainOptions, corpus: Corpus) -> Any:
    source = options.tokenizer or options.distill_from or options.initialise_from
    if source is not None:
        return AutoTokenizer.from_pretrained(resolve(source))
    return train_tokenizer(corpus.training.texts, options.vocabulary_size, options.max_positions)


def _teacher(options: PretrainOptions, vocabulary: int) -> Any:
    if options.distill_from is None:
        return None
    teacher = AutoModelForCausalLM.from_pretrained(resolve(options.distill_from), dtype=torch.float32)
    if teacher.config.vocab_size != vocabulary:
        raise ConfigError(
            f"the target {options.distill_from} has {teacher.config.vocab_size} tokens and the tokenizer {vocabulary}; "
            "a draft must share its target's tokenizer: leave `tokenizer` unset"
        )
    return teacher.to(options.where).eval().requires_grad_(False)


def _target_texts(options: PretrainOptions, teacher: Any, training: Tensor, end_of_text: int) -> list[Tensor]:
    if teacher is None or options.target_text_tokens == 0:
        return []
    with _precision(options):
        rows = write_target_text(
            teacher,
            training,
            amount=options.target_text_tokens,
            prompt_tokens=options.target_text_prompt,
            new_tokens=options.target_text_length,
            batch=options.target_text_batch,
            temperature=options.target_text_temperature,
            seed=options.seed,
        )
    return [join_rows(rows, end_of_text)]


def _objective(options: PretrainOptions, tokenizer: Any) -> Objective:
    return ParallelObjective(options, find_mask_token(tokenizer)) if options.parallel_drafts else objective


def _agreement(options: PretrainOptions, model: Any, teacher: Any, held_out: Tensor, end_of_text: int) -> float | None:
    if teacher is None:
        return None
    prompts = even_windows(held_out, options.agreement_prompt_tokens, options.agreement_prompts)
    return greedy_agreement(model, teacher, prompts, options.agreement_new_tokens, end_of_text)


def _agreement_by_draft(
    options: PretrainOptions, model: Any, teacher: Any, held_out: Tensor, tokenizer: Any
) -> tuple[float, ...]:
    if teacher is None or not options.parallel_drafts:
        return ()
    return parallel_agreement(
        model,
        teacher,
        even_windows(held_out, options.agreement_prompt_tokens, options.agreement_prompts),
        options.agreement_new_tokens,
        tokenizer.eos_token_id,
        options.parallel_drafts,
        find_mask_token(tokenizer),
    )
