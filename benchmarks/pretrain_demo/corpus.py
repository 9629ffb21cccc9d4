"""Write tokenizer and scripted episodes: `python -m benchmarks.pretrain_demo.corpus OUT`.

Episodes run through the real sessions, so that pretraining sees exactly the tokens, positions and
mounts that the demo's episodes have. A CPU and a minute are enough.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.pretrain_demo.dry_episodes import DryService
from benchmarks.pretrain_demo.strips import Number, Strip, save_strips, strip_from_record
from harness_sdk.cli.demo.task import RelayTask, draw_tasks
from harness_sdk.cli.demo.teacher import Script, draw_script, play
from harness_sdk.record import EpisodeRecord

logger = logging.getLogger(__name__)

SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip

FORKS, READS = 0.5, 0.4
"""Share of scripted roots that fork, and of openers that read, in pretraining."""


def main(argv: list[str] | None = None) -> int:
    """Train the tokenizer, play the episodes, save both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--episodes", type=int, default=3000)
    parser.add_argument("--vocab", type=int, default=768)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stdout)
    args.out.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(args.out / "tokenizer.json"))
    service = DryService(args.out)
    plain = asyncio.run(_play(service, seed=args.seed, count=min(args.episodes, 300)))
    texts = [text for record, _, _ in plain for text in _texts(service, record)]
    byte_tokenizer(texts, args.vocab).save(str(args.out / "tokenizer.json"))
    service = DryService(args.out)
    played = asyncio.run(_play(service, seed=args.seed, count=args.episodes))
    strips = [record_strip(service, *episode) for episode in played]
    digits = [_plain_ids(service, str(digit))[0] for digit in range(10)]
    save_strips(args.out / "episodes.npz", strips, digits)
    _report(service, [record for record, _, _ in played])
    return 0


async def _play(
    service: DryService, *, seed: int, count: int
) -> list[tuple[EpisodeRecord, RelayTask, Script]]:
    rng = random.Random(seed)
    played = []
    for task in islice(draw_tasks(seed), count):
        script = draw_script(rng, task, forks=FORKS, reads=READS)
        async with service.episode(task.task_id) as episode:
            await play(episode, task, script)
        played.append((service.last_record, task, script))
    return played


def byte_tokenizer(texts: Sequence[str] = (), vocab_size: int = 0) -> Tokenizer:
    """Byte-level BPE whose merges cross spaces and quotes: a whole call is a few tokens.

    Args:
        texts: What merges are learned from; none leaves single bytes.
        vocab_size: Ids at most, control tokens included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size - len(SPECIALS), 0),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS[:3]])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in SPECIALS[3:]])
    return tokenizer


def _texts(service: DryService, record: EpisodeRecord) -> Iterator[str]:
    """What stands between the control tokens of each node."""
    control = re.compile("|".join(re.escape(name) for name in SPECIALS))
    for node in record.nodes:
        yield from filter(None, control.split(service.tokenizer.decode(node.token_ids)))


def record_strip(
    service: DryService, record: EpisodeRecord, task: RelayTask, script: Script
) -> Strip:
    """The record as arrays, its numbers marked."""
    texts = {task.code: False, task.treasure: False, task.dust: False, script.guess: True}
    numbers = [
        Number(digit_ids=_plain_ids(service, text), guessed=guessed)
        for text, guessed in texts.items()
    ]
    return strip_from_record(record, numbers)


def _plain_ids(service: DryService, text: str) -> tuple[int, ...]:
    return service.tokenizer.encode_plain(text)


def _report(service: DryService, records: Sequence[EpisodeRecord]) -> None:
    lengths = [record.num_tokens for record in records]
    sampled = [record.num_sampled for record in records]
    logger.info(
        "%d episodes, %d ids; tokens mean %.0f max %d, sampled mean %.0f max %d",
        len(records),
        service.tokenizer.vocab_size,
        sum(lengths) / len(lengths),
        max(lengths),
        sum(sampled) / len(sampled),
        max(sampled),
    )
    longest = max(records, key=lambda record: record.num_tokens)
    for node in longest.nodes:
        pieces = [service.tokenizer.decode([token]) for token in node.token_ids]
        logger.info("%s %d %s %s", node.thread_id, node.step, node.kind.name, "|".join(pieces))


if __name__ == "__main__":
    sys.exit(main())
