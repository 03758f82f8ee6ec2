"""Makes the parts that read prompts and end answers: tokenizer, images, sounds, and forms of answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mllm_compile.config.resolution.seen_images import images_obstacle
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.errors import ConfigError
from mllm_compile.files.json_file import HeldFiles
from mllm_compile.media.files import CONFIG_FILE, PROCESSOR_FILES
from mllm_compile.media.log_mel import read_log_mel
from mllm_compile.media.preprocessor import MediaPreprocessor
from mllm_compile.process.progress import Reporter
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.store.artifact import TOKENIZER
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.structured.grammars import Grammars
from mllm_compile.structured.vocabulary import Vocabulary
from mllm_compile.text.added_tokens import told_to_split
from mllm_compile.text.generation_defaults import GenerationDefaults, default_params, load_generation_defaults
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer


def load_text_parts(
    compiled: CompiledRuntime, timeline: Timeline
) -> tuple[Tokenizer | None, GenerationDefaults, SamplingParams]:
    """The tokenizer, None where the model has none, and what its generation_config.json says of answers."""
    with timeline.stage("load tokenizer"):
        tokenizer = load_tokenizer(compiled.folder / TOKENIZER, HeldFiles(text_files(compiled)))
        defaults = load_generation_defaults(compiled.folder, HeldFiles(compiled.artifact.texts))
        return tokenizer, defaults, default_params(defaults, compiled.folder)


def text_files(compiled: CompiledRuntime) -> dict[str, bytes]:
    """The files of the tokenizer and of the processor: the bytes that were hashed, not those that a file has now."""
    start = TOKENIZER + "/"
    texts = compiled.artifact.texts
    files = {name.removeprefix(start): data for name, data in texts.items() if name.startswith(start)}
    if files and compiled.config.model.split_special_tokens:
        files = told_to_split(files, compiled.folder / TOKENIZER)
    if any(name in files for name in PROCESSOR_FILES):
        files[CONFIG_FILE] = texts[CONFIG_FILE]
    return files


def ends_of_answers(
    defaults: GenerationDefaults, tokenizer: Tokenizer | None, vocab_size: int, reporter: Reporter
) -> frozenset[int]:
    """The end-of-sequence ids that the model can sample; the tokenizer's where the model's files name none.

    min_tokens forbids columns of the logits: an id beyond them would fail every request of its step.
    """
    named = defaults.eos_token_ids
    if not named and tokenizer is not None and tokenizer.eos_token_id is not None:
        named = frozenset({tokenizer.eos_token_id})
    known = frozenset(token_id for token_id in named if token_id < vocab_size)
    if known != named:
        ends = "others end answers" if known else "answers end at max_tokens or a stop text alone"
        reporter.announce(
            f"eos_token_id {short_repr(min(named - known))} is beyond the model's vocabulary of {vocab_size} and never "
            f"sampled: {ends}"
        )
    return known


def grammars(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int], config: ResolvedConfig
) -> Grammars | None:
    """Compiles forms of answers; nothing of it happens before a request asks for one."""
    if tokenizer is None:
        return None
    asked = config.structured_outputs

    def read_vocabulary() -> Vocabulary:
        names = tokenizer.special_token_ids, tokenizer.token_to_id("<|notimestamps|>")
        return Vocabulary.of(tokenizer.token_bytes(vocab_size), eos_token_ids, *names)

    return Grammars(read_vocabulary, asked.backends, asked.threads)


def tower_of(runner: ModelRunner, compiled: CompiledRuntime) -> Tower | str:
    """The tower that prompts with images are checked with, or why they are refused."""
    if compiled.artifact.program.images is not None and (why := images_obstacle(compiled.config)) is not None:
        return f"{why}, under which text alone is served"
    runtime, media = runner.config.runtime, runner.model.media
    if runner.pipeline is not None:
        return "runtime.pipeline_parallel_size is set, under which text alone is served"
    if runner.model.images is not None:
        most = runner.max_source_len
        return replace(runner.model.images.facts, page_size=runtime.page_size, max_length=most)
    if media is None:
        return "the model takes text alone, or images by a protocol that is not served (docs/images.md)"
    if runtime.skip_compiled:
        return "runtime.skip_compiled is set, under which text alone is served"
    if runtime.deterministic and media.facts.sees_ahead:
        return (
            "runtime.deterministic is set, under which every token is a row that sees what is before it, and tokens of "
            "this model's images see those behind them too: text alone is served"
        )
    return media.facts


def media_preprocessor(
    compiled: CompiledRuntime, files: Mapping[str, bytes], max_model_len: int, tower: Tower | str
) -> MediaPreprocessor:
    """The preprocessor of images and videos of prompts.

    Args:
        files: as text_files gives them.
        tower: as tower_of gives it.
    """
    config = compiled.config
    why_not = tower if isinstance(tower, str) else None
    return MediaPreprocessor(config.model.source, files, max_model_len, why_not, config.media.allowed_domains)


def decoder_prompts(
    runner: ModelRunner,
    defaults: GenerationDefaults,
    tokenizer: Tokenizer | None,
    files: Mapping[str, bytes],
    reporter: Reporter,
) -> DecoderPrompts | None:
    """The decoder's side of prompts, of an encoder-decoder; None of another model.

    Raises:
        ConfigError: its files name no token that a decoder begins with.
    """
    sources = runner.model.sources
    if sources is None:
        return None
    start, vocab_size = defaults.decoder_start, runner.vocab_size
    if not start or max(start) >= vocab_size:
        raise ConfigError(
            "the model has a decoder, which begins with decoder_start_token_id: expected a token id below "
            f"{vocab_size} in generation_config.json or config.json, got {start[:1] or 'none'}. Correct it in the "
            "model's folder."
        )
    if defaults.not_applied:
        reporter.announce(f"generation_config.json's {', '.join(defaults.not_applied)} are not applied")
    facts = replace(sources.facts, max_length=runner.max_source_len)
    log_mel = read_log_mel(files, facts.bins, facts.frames) if facts.is_sound else "the encoder reads texts"
    return DecoderPrompts(start, vocab_size, facts, tokenizer, log_mel)
