"""The settings and the result of pre-training a small language model."""

from dataclasses import dataclass, field

from specflow.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PretrainOptions:
    """Settings of one training run; all are plain YAML values.

    output: folder that receives the model and its tokenizer.
    corpus_root: folder of Python source files; None is the standard library of the running Python.
    tokenizer: folder of a tokenizer to use (`zoo:target` is the bundled one); None fits a new one to the corpus, or,
        with distill_from, takes the tokenizer of that model.
    vocabulary_size: tokens of a newly fitted tokenizer, special ones included.

    hidden_size: width of the residual stream.
    intermediate_size: width inside the feed-forward layers.
    layers: number of decoder layers.
    heads: attention heads.
    key_value_heads: heads of keys and values; divides `heads`.
    head_dim: width of one head; even.
    max_positions: the longest context the saved model states, in tokens.
    initialise_from: folder of a model of these sizes whose weights are the first ones (`zoo:draft` is the bundled
        draft); None draws them.

    sequence_length: tokens per training window; longer contexts are untrained.
    batch_windows: windows per optimizer step.
    steps: optimizer steps.
    learning_rate: peak rate of AdamW.
    warmup_steps: steps of linear rise to the peak.
    final_rate_fraction: where the cosine fall ends, as a fraction of the peak.
    weight_decay: decoupled decay of all matrices (not of norms).
    dropout: share of the activations dropped after the embedding, attention and feed-forward layers while training.
    beta1, beta2: decay rates of AdamW's two moments.
    gradient_clip: largest norm of the whole gradient.
    seed: of initial weights, windows and sampled text.
    evaluate_every: steps between measurements on held-out text; the weights that measure best are kept.
    log_every: steps between reports to `on_progress`.

    device: "cpu" or "cuda"; None = the device of the run's backend.
    threads: threads of torch on the CPU; 0 leaves torch's own choice.
    bf16: run matrix products in bfloat16 (the weights stay float32 while training).
    compile: compile the step with torch.compile.

    distill_from: folder of a target model to imitate (or `zoo:target`); None trains on text alone.
    distill_weight: share of the Kullback-Leibler term in the loss; the rest is cross-entropy. From 0 to 1.
    target_text_tokens: tokens the target writes beforehand as further training text; 0 uses the corpus alone.
    target_text_prompt: tokens of training text that each of its continuations starts from.
    target_text_length: tokens of each continuation.
    target_text_batch: continuations written at once.
    target_text_temperature: sampling temperature of every second continuation; the others are greedy.
    agreement_prompts: held-out prompts on which the agreement with the target is measured at the end.
    agreement_prompt_tokens: tokens per such prompt.
    agreement_new_tokens: tokens the target continues each with.

    parallel_drafts: drafts that the model learns to make in one pass (`proposer=pard`); 0 trains an ordinary model.
    parallel_keep: share of the places that stay from one draft's rows to the next one's, which spares computing.
    parallel_keep_least: share of the places that every draft keeps at least.
    """

    output: str
    corpus_root: str | None = None
    tokenizer: str | None = None
    vocabulary_size: int = 4096

    hidden_size: int = 256
    intermediate_size: int = 768
    layers: int = 8
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    initialise_from: str | None = None

    sequence_length: int = 1024
    batch_windows: int = 64
    steps: int = 1000
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_rate_fraction: float = 0.0
    weight_decay: float = 0.1
    dropout: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_clip: float = 1.0
    seed: int = 0
    evaluate_every: int = 250
    log_every: int = 50

    device: str | None = None
    threads: int = 0
    bf16: bool = True
    compile: bool = False

    distill_from: str | None = None
    distill_weight: float = 0.9
    target_text_tokens: int = 0
    target_text_prompt: int = 128
    target_text_length: int = 384
    target_text_batch: int = 64
    target_text_temperature: float = 1.0
    agreement_prompts: int = 64
    agreement_prompt_tokens: int = 128
    agreement_new_tokens: int = 128

    parallel_drafts: int = 0
    parallel_keep: float = 0.7
    parallel_keep_least: float = 0.2

    @property
    def where(self) -> str:
        """The device in force."""
        return self.device or "cpu"

    def __post_init__(self) -> None:
        """ConfigError for values that cannot work."""
        if self.device not in (None, "cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; use cpu or cuda")
        if self.key_value_heads < 1 or self.heads % self.key_value_heads or self.head_dim % 2:
            raise ConfigError(
                f"{self.heads} heads of width {self.head_dim} with {self.key_value_heads} key-value heads: the width "
                "must be even and key_value_heads must divide heads"
            )
        if self.sequence_length > self.max_positions:
            raise ConfigError(f"sequence_length {self.sequence_length} exceeds max_positions {self.max_positions}")
        if not 0 <= self.distill_weight <= 1:
            raise ConfigError(f"distill_weight is {self.distill_weight}; it is a share, from 0 to 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}; it is a share, at least 0 and below 1")
        if self.parallel_drafts < 0:
            raise ConfigError(f"parallel_drafts is {self.parallel_drafts}; it is 0 (an ordinary model) or more")
        if self.parallel_drafts > min(self.sequence_length, self.agreement_new_tokens):
            raise ConfigError(
                f"parallel_drafts {self.parallel_drafts} exceeds sequence_length {self.sequence_length} or "
                f"agreement_new_tokens {self.agreement_new_tokens}: raise those"
            )
        for name in ("parallel_keep", "parallel_keep_least"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share, above 0 and at most 1")
        for name in ("steps", "batch_windows", "sequence_length", "evaluate_every", "log_every", "vocabulary_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of training text per optimizer step."""
        return self.batch_windows * self.sequence_length


@dataclass(frozen=True)
class Progress:
    """One report while training.

    step: steps done, from 1; steps: steps in all.
    loss: training loss of this step, in nats per token.
    learning_rate: of this step.
    tokens_per_second: since training began, measurements on held-out text left out.
    held_out_loss: objective on held-out text in nats per token, when this step measured it.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_second: float
    held_out_loss: float | None = None


@dataclass(frozen=True)
class PretrainResult:
    """What one training run gave.

    output: the folder with the saved model.
    parameters: number of weights (tied ones once).
    training_files, undecodable_files: source files read, and those left out because they are not UTF-8.
    training_tokens, held_out_tokens: unique tokens of either text.
    target_text_tokens: tokens of the text written by the target, its prompts included.
    tokens_seen: tokens the optimizer steps consumed.
    seconds: wall time of the steps, without measurements.
    train_loss: mean objective of the last reported steps, in nats per token.
    best_step: the step whose weights are saved.
    held_out_loss: cross-entropy of the saved bfloat16 weights on held-out text, in nats per token.
    held_out_bits_per_byte: the same in bits per byte of text.
    agreement: share of the target's greedy held-out tokens that are also this model's argmax; None without a target.
    history: (step, held-out objective) at every measurement.
    agreement_by_draft: of a parallel drafter, for each of its drafts the share of places at which it and all drafts
        before it are what the target chose; empty for an ordinary model and without a target.
    """

    output: str
    parameters: int
    training_files: int
    undecodable_files: int
    training_tokens: int
    held_out_tokens: int
    target_text_tokens: int
    tokens_seen: int
    seconds: float
    train_loss: float
    best_step: int
    held_out_loss: float
    held_out_bits_per_byte: float
    agreement: float | None
    history: list[tuple[int, float]] = field(default_factory=list)
    agreement_by_draft: tuple[float, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Training speed in tokens per second."""
        return self.tokens_seen / self.seconds if self.seconds else 0.0
