"""Trains the embedded model: a small Qwen3, its tokenizer and its model card, from nothing and with no network.

    python examples/tiny_models/train_tiny.py --device cuda           # the real one: all recipes, about 4 minutes
    python examples/tiny_models/train_tiny.py --device cpu --steps 900 --minutes 3 --weight-decay 0.1 --evaluations 4 \
        --context 256 --batch-tokens 512 --out /tmp/tiny              # a rough one, to try the script

Without --out it replaces the embedded model.

Owns the tokenizer and the training. The text comes from tiny_corpus.py, the model card is tiny_card.py's. The text is
far less than such a model could learn from. So several recipes (passes over the text, weight decay) run, each with its
own learning-rate schedule, until its validation loss turns. The best checkpoint of all is saved.

Shape legend: N tokens of a stream, B windows of a batch, T context.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import random
import time
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
import transformers
from tiny_card import model_card, perplexity, stream_loss
from tiny_corpus import Corpus, Document, read_corpus
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
VOCAB_SIZE = 3072
MAX_POSITIONS = 2048
SEED = 0


@dataclass(frozen=True)
class Recipe:
    """One training run: `steps` of AdamW at a cosine learning rate, decoupled weight decay on the matrices."""

    steps: int
    weight_decay: float
    learning_rate: float


@dataclass
class Best:
    """The best checkpoint so far; `weights` are on the CPU in float32."""

    validation_loss: float = math.inf
    weights: dict[str, torch.Tensor] | None = None
    recipe: Recipe | None = None
    step: int = 0


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    corpus = read_corpus()
    tokenizer = train_tokenizer(corpus.train)
    streams = {
        "train": encode(tokenizer, shuffled([d.text for d in corpus.train] + chat_texts(tokenizer, corpus))),
        "validation": encode(tokenizer, [d.text for d in corpus.validation]),
        "held_out": encode(tokenizer, [d.text for d in corpus.held_out]),
    }
    print({name: f"{stream.numel():,} tokens" for name, stream in streams.items()}, flush=True)
    streams = {name: stream.to(args.device) for name, stream in streams.items()}

    model = Qwen3ForCausalLM(model_config(tokenizer)).to(args.device)
    untrained = perplexity(model, tokenizer, streams["held_out"])
    started = time.monotonic()
    best = train_all(model, streams, args)
    facts = facts_of(corpus, streams, best, args, time.monotonic() - started)
    save(model, best, tokenizer, args.out)

    # The saved bf16 weights are read back and measured.
    torch.set_float32_matmul_precision("highest")
    saved = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).to(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    trained = perplexity(saved, tokenizer, streams["held_out"])
    card = model_card(saved.cpu(), tokenizer, facts, trained, untrained)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    print(card)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    default_out = Path(__file__).resolve().parents[2] / "mllm_compile/model/tiny"
    parser.add_argument("--out", type=Path, default=default_out, help="folder to write (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=float, nargs="+", default=[32, 64], help="passes over the text to try")
    parser.add_argument("--weight-decay", type=float, nargs="+", default=[0.3, 1.0, 3.0], help="values to try")
    parser.add_argument("--steps", type=int, help="steps of each run, instead of --epochs")
    parser.add_argument("--minutes", type=float, default=4.0, help="limit on all training together")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--context", type=int, default=MAX_POSITIONS, help=f"tokens a window, up to {MAX_POSITIONS}")
    parser.add_argument("--batch-tokens", type=int, default=4 * MAX_POSITIONS, help="tokens a step")
    parser.add_argument("--evaluations", type=int, default=24, help="looks at the validation loss, each run")
    args = parser.parse_args()
    for name in ("steps", "minutes", "evaluations"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be above 0, got {value}")
    if not 1 <= args.context <= min(MAX_POSITIONS, args.batch_tokens):
        parser.error(f"--context must be from 1 to {MAX_POSITIONS} and at most --batch-tokens, got {args.context}")
    return args


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text has tokens, and decoding gives its bytes back."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN, END_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def chat_texts(tokenizer: PreTrainedTokenizerFast, corpus: Corpus) -> list[str]:
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], tokenize=False
        )
        for question, answer in corpus.chats
    ]


def shuffled(texts: list[str]) -> list[str]:
    return random.Random(SEED).sample(texts, len(texts))


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """[N] int64 on the CPU: the texts one after another, each opened by END_OF_TEXT, which also ends the stream."""
    stream = [tokenizer.bos_token_id]
    for text in texts:
        stream += tokenizer.encode(text, add_special_tokens=False, verbose=False)
        stream.append(tokenizer.bos_token_id)
    return torch.tensor(stream)


def model_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """2.95 M parameters, 5.9 MB in bf16. Head dim 128 and groups of 2 are shapes that the GPU's kernels serve. Two KV
    heads, not one, show a wrong mapping of query heads to KV heads."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=MAX_POSITIONS,
        max_window_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train_all(model: Qwen3ForCausalLM, streams: dict[str, torch.Tensor], args: argparse.Namespace) -> Best:
    """Tries the weight decays at the first length, then the other lengths at the best decay.

    Every run starts from the same weights, and gets the share of the time left that its steps are of those left.
    Mutates `model`; returns the best checkpoint of all runs.
    """
    epoch_steps = streams["train"].numel() / args.batch_tokens
    first, *others = [args.steps] if args.steps else [math.ceil(epochs * epoch_steps) for epochs in args.epochs]
    initial = copy.deepcopy(model.state_dict())
    deadline = time.monotonic() + 60 * args.minutes
    best = Best()
    plan = [(first, decay) for decay in args.weight_decay] + [(steps, None) for steps in others]
    for index, (steps, decay) in enumerate(plan):
        if decay is None:
            decay = best.recipe.weight_decay
        model.load_state_dict(initial)
        share = steps / sum(steps_left for steps_left, _ in plan[index:])
        recipe = Recipe(steps, decay, args.learning_rate)
        train_one(model, streams, recipe, share * (deadline - time.monotonic()), args, best)
    return best


def train_one(
    model: Qwen3ForCausalLM,
    streams: dict[str, torch.Tensor],
    recipe: Recipe,
    seconds: float,
    args: argparse.Namespace,
    best: Best,
) -> None:
    """One run; mutates `model`, and `best` where it beats it.

    If `seconds` end before the steps do, the schedule follows the clock instead, so that the learning rate always comes
    down. The result then depends on the machine's speed.
    """
    optimizer = make_optimizer(model, recipe)
    batches = torch.Generator().manual_seed(SEED)
    started = time.monotonic()
    run_best, best_evaluation, next_evaluation = math.inf, 0, 1
    progress, step = 0.0, 0
    while progress < 1:
        rate = recipe.learning_rate * schedule(progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = train_step(model, optimizer, draw_batch(streams["train"], batches, args), args.device)
        step += 1
        progress = max(step / recipe.steps, (time.monotonic() - started) / seconds)
        if progress * args.evaluations < next_evaluation:
            continue
        validation_loss = stream_loss(model, streams["validation"], args.context)
        print(f"{recipe} step {step} train {loss.item():.3f} validation {validation_loss:.3f}", flush=True)
        if validation_loss < run_best:
            run_best, best_evaluation = validation_loss, next_evaluation
        if validation_loss < best.validation_loss:
            best.validation_loss, best.recipe, best.step = validation_loss, recipe, step
            best.weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
        if next_evaluation - best_evaluation >= max(1, args.evaluations // 4):
            break  # a quarter of the run without a better one
        next_evaluation = math.floor(progress * args.evaluations) + 1


def make_optimizer(model: Qwen3ForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def schedule(progress: float, warmup: float = 0.04, floor: float = 0.02) -> float:
    """The learning rate's factor: up from `floor` in a straight line, then a cosine back down to it."""
    if progress < warmup:
        return floor + (1 - floor) * progress / warmup
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def draw_batch(stream: torch.Tensor, generator: torch.Generator, args: argparse.Namespace) -> torch.Tensor:
    """[B, T + 1] windows at random offsets; drawn on the CPU, so that every device sees the same batches."""
    num_windows = args.batch_tokens // args.context
    offsets = torch.randint(stream.numel() - args.context, (num_windows, 1), generator=generator)
    return stream[(offsets + torch.arange(args.context + 1)).to(stream.device)]


def train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, windows: torch.Tensor, device: str
) -> torch.Tensor:
    """One step of AdamW; the mean loss, on the device."""
    model.train()
    with torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda")):
        logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def save(model: Qwen3ForCausalLM, best: Best, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the folder in Hugging Face's own format, weights in bf16; mutates `model`."""
    if best.weights is None:
        raise SystemExit("no evaluation gave a finite validation loss; try a smaller --learning-rate")
    model.load_state_dict(best.weights)
    model.to("cpu", torch.bfloat16)
    end_ids = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, pad_token_id=tokenizer.pad_token_id
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # some releases write it for the owner alone
    tokenizer.save_pretrained(out)


def facts_of(
    corpus: Corpus, streams: dict[str, torch.Tensor], best: Best, args: argparse.Namespace, seconds: float
) -> dict[str, str]:
    """The rows of the model card's table."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU ({platform.machine()})"
    num_bytes = sum(len(document.text.encode()) for document in corpus.train)
    num_train_tokens, num_held_out_tokens = streams["train"].numel(), streams["held_out"].numel()
    recipe = best.recipe
    epochs = best.step * args.batch_tokens / num_train_tokens
    return {
        "training text": f"{len(corpus.train)} documents, {num_bytes:,} bytes; with {len(corpus.chats)} questions and"
        f" answers {num_train_tokens:,} tokens",
        "kept apart": f"{len(corpus.validation)} documents that chose the checkpoint, and {len(corpus.held_out)} others"
        f" that are measured below ({num_held_out_tokens:,} tokens); what the training text shared with them was"
        " dropped from it",
        "run": f"{best.step} of {recipe.steps} steps of {args.batch_tokens} tokens ({epochs:.1f} passes), context"
        f" {args.context}, AdamW at {recipe.learning_rate}, weight decay {recipe.weight_decay}, seed {SEED}",
        "machine": f"{device}, {seconds:.0f} s with all recipes tried",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, transformers"
        f" {transformers.__version__}, tokenizers {tokenizers.__version__}",
    }


if __name__ == "__main__":
    main()
