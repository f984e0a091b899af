"""The built-in components, registered through the hooks that any plugin uses.

Everything is a "module:attribute" string: a component is imported when it is used, and not to list or to explain it.
"""

from collections.abc import Sequence
from pathlib import Path

from specflow.paths import config_root
from specflow.plugins.component import Component
from specflow.plugins.hookspecs import hookimpl


def _component(name: str, module: str, factory: str, options: str, summary: str) -> Component:
    """A component of a module inside the package; `options` may name another module with a colon."""
    schema = options if ":" in options else f"{module}:{options}"
    return Component(name, f"specflow.{module}:{factory}", f"specflow.{schema}", summary)


@hookimpl
def specflow_targets() -> Sequence[Component]:
    """Hugging Face models and the one in the package."""
    return [
        _component("bundled", "targets.bundled", "BundledTarget", "BundledOptions", "the small model in the package"),
        _component("hf", "targets.hf", "HfTarget", "HfOptions", "any Hugging Face causal language model"),
    ]


@hookimpl
def specflow_proposers() -> Sequence[Component]:
    """Drafting methods."""
    return [
        _component("ngram", "proposers.ngram", "NgramProposer", "NgramOptions", "repeats what followed an n-gram"),
        _component(
            "ngram_gpu", "proposers.ngram_gpu", "NgramGpuProposer", "NgramGpuOptions", "ngram, found on the device"
        ),
        _component("suffix", "proposers.suffix", "SuffixProposer", "SuffixOptions", "repeats itself or past outputs"),
        _component(
            "draft_model",
            "proposers.draft_model",
            "DraftModelProposer",
            "DraftModelOptions",
            "a smaller language model with the target's vocabulary",
        ),
        _component(
            "pard", "proposers.pard", "PardProposer", "PardOptions", "a model trained to draft all tokens in one pass"
        ),
        _component(
            "eagle3",
            "proposers.eagle3",
            "Eagle3Proposer",
            "Eagle3Options",
            "a small trained head drafts a chain from the target's hidden states",
        ),
        _component(
            "dflash",
            "proposers.dflash",
            "DFlashProposer",
            "DFlashOptions",
            "a small trained head fills a block of drafts in one pass",
        ),
        _component(
            "custom_class",
            "proposers.custom_class",
            "CustomClassProposer",
            "CustomClassOptions",
            "a class of yours, from a module or a plain file",
        ),
        _component(
            "extract_hidden_states",
            "proposers.extract_hidden_states",
            "refuse",
            "ExtractHiddenStatesOptions",
            "vLLM's name; here: task=extract",
        ),
    ]


@hookimpl
def specflow_trainable_heads() -> Sequence[Component]:
    """What `task=train` trains."""
    return [
        _component(
            "eagle3",
            "training.eagle3",
            "Eagle3Training",
            "Eagle3TrainingOptions",
            "a decoder layer that drafts token by token from the target's hidden states",
        ),
        _component(
            "dflash",
            "training.dflash",
            "DFlashTraining",
            "DFlashTrainingOptions",
            "a few layers that draft a block in one pass from the target's hidden states",
        ),
    ]


@hookimpl
def specflow_samplers() -> Sequence[Component]:
    """Verification methods."""
    return [
        _component(
            "standard",
            "samplers.standard",
            "StandardSampler",
            "StandardOptions",
            "greedy and rejection sampling, lossless",
        ),
        _component(
            "coupled",
            "samplers.coupled",
            "CoupledSampler",
            "CoupledOptions",
            "same output under a seed as plain decoding, lossless",
        ),
        _component(
            "block",
            "samplers.block",
            "BlockSampler",
            "BlockOptions",
            "block verification, lossless; for sampled drafts",
        ),
        _component(
            "synthetic",
            "samplers.synthetic",
            "SyntheticSampler",
            "SyntheticOptions",
            "accepts at rates you set, to measure; lossy",
        ),
        _component(
            "typical", "samplers.typical", "TypicalSampler", "TypicalOptions", "Medusa's typical acceptance; lossy"
        ),
    ]


@hookimpl
def specflow_schedulers() -> Sequence[Component]:
    """Batching policies."""
    return [
        _component(
            "continuous",
            "schedulers.continuous",
            "ContinuousScheduler",
            "ContinuousOptions",
            "continuous batching with chunked prefill and pre-emption",
        ),
        _component(
            "adaptive",
            "schedulers.adaptive",
            "AdaptiveScheduler",
            "AdaptiveOptions",
            "the same, with as many drafts per request and step as pay",
        ),
    ]


@hookimpl
def specflow_backends() -> Sequence[Component]:
    """Devices."""
    return [
        _component("auto", "backends.auto", "auto_backend", "AutoOptions", "cuda, else rocm, else cpu"),
        _component("cpu", "backends.cpu", "CpuBackend", "CpuOptions", "the processor"),
        _component("cuda", "backends.cuda", "CudaBackend", "CudaOptions", "one NVIDIA GPU"),
        _component("rocm", "backends.rocm", "RocmBackend", "RocmOptions", "one AMD GPU"),
    ]


@hookimpl
def specflow_engines() -> Sequence[Component]:
    """What runs a composition: specflow, or another project to compare with."""
    return [
        _component("specflow", "peers.base", "SpecflowEngine", "SpecflowEngineOptions", "specflow's own engine"),
        _component(
            "transformers",
            "peers.transformers_engine",
            "TransformersEngine",
            "TransformersOptions",
            "Hugging Face's generate, one request at a time",
        ),
        _component(
            "vllm", "peers.vllm_engine", "VllmEngine", "peers.vllm_options:VllmOptions", "an installed vLLM, offline"
        ),
    ]


def _benchmark(name: str, factory: str, summary: str) -> Component:
    return _component(name, "workloads.benchmarks", factory, "BenchmarkOptions", summary)


@hookimpl
def specflow_workloads() -> Sequence[Component]:
    """Prompt sets."""
    return [
        _component("bundled", "workloads.bundled", "BundledWorkload", "BundledOptions", "the prompts in the package"),
        _component(
            "corpus",
            "workloads.corpus",
            "CorpusWorkload",
            "CorpusOptions",
            "beginnings of Python source, to train heads of the bundled model",
        ),
        _component("jsonl", "workloads.jsonl", "JsonlWorkload", "JsonlOptions", "a file of prompts or conversations"),
        _component(
            "random", "workloads.random_tokens", "RandomWorkload", "RandomOptions", "random token ids of given lengths"
        ),
        _benchmark("gsm8k", "Gsm8kWorkload", "grade-school mathematics"),
        _benchmark("math500", "Math500Workload", "competition mathematics"),
        _benchmark("humaneval", "HumanEvalWorkload", "Python functions to complete"),
        _benchmark("mbpp", "MbppWorkload", "Python tasks in a sentence"),
        _benchmark("mt_bench", "MtBenchWorkload", "two-turn conversations in eight categories"),
        _benchmark("swe_bench", "SweBenchWorkload", "issues of Python repositories"),
        _benchmark("spec_bench", "SpecBenchWorkload", "six task families for speculative decoding"),
    ]


@hookimpl
def specflow_tasks() -> Sequence[Component]:
    """What one run does."""
    return [
        _component("bench", "tasks.bench", "BenchTask", "BenchOptions", "compare the proposer with plain decoding"),
        _component("generate", "tasks.generate", "GenerateTask", "GenerateOptions", "print answers to given prompts"),
        _component("verify", "tasks.verify", "VerifyTask", "VerifyOptions", "prove the composition lossless"),
        _component("profile", "tasks.profile", "ProfileTask", "ProfileOptions", "time the parts of a decode step"),
        _component(
            "train",
            "tasks.train",
            "TrainTask",
            "training.train_options:TrainOptions",
            "train a drafting head for the target",
        ),
        _component(
            "tune",
            "tuning.task",
            "TuneTask",
            "tuning.options:TuneOptions",
            "find the fastest method and length for a target and prompts",
        ),
        _component("report", "tasks.report", "ReportTask", "ReportOptions", "finished runs on one page"),
        _component("compare", "tasks.compare", "CompareTask", "CompareOptions", "how two finished runs differ"),
        _component(
            "export", "tasks.export", "ExportTask", "ExportOptions", "the composition as a command of `vllm serve`"
        ),
        _component("extract", "tasks.extract", "ExtractTask", "ExtractOptions", "save the target's hidden states"),
        _component("plugins", "tasks.plugins", "PluginsTask", "PluginsOptions", "list every component and plugin"),
        _component(
            "new-plugin",
            "tasks.new_plugin",
            "NewPluginTask",
            "NewPluginOptions",
            "write a plugin package to start from",
        ),
        _component(
            "pretrain",
            "tasks.pretrain",
            "PretrainTask",
            "training.pretrain_options:PretrainOptions",
            "train a small language model, such as the bundled ones",
        ),
    ]


@hookimpl
def specflow_trackers() -> Sequence[Component]:
    """Where results go."""
    return [
        _component("mlflow", "tracking.mlflow", "MlflowTracker", "MlflowOptions", "MLflow, by default SQLite in runs/"),
        _component("none", "tracking.none", "NoTracker", "NoOptions", "the run's folder only"),
    ]


@hookimpl
def specflow_config_dirs() -> Sequence[Path]:
    """The configuration tree `conf`."""
    return [config_root()]
