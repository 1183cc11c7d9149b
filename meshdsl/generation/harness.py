"""The adapter of lm-evaluation-harness: a trained model that its tasks ask.

`lm_eval.simple_evaluate(HarnessModel(...), tasks=["hellaswag"])`. It needs the package `lm_eval`.

Guarantees:
    Scores do not depend on the mesh, the layout and the batch size, up to rounding.
    Requests of one kind are answered with few compilations, whatever their lengths.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from meshdsl.generation.continuous import RowWriter
from meshdsl.generation.likelihood import Likelihood, LikelihoodScorer
from meshdsl.generation.programs import Place
from meshdsl.generation.sampling import Sampling
from meshdsl.generation.serving.chat import Template, Unfit
from meshdsl.generation.serving.engine import Engine, Event, Request
from meshdsl.generation.texts import Text
from meshdsl.models.model import Model
from meshdsl.training.data.tokenizers import Tokenizer

LENGTH = 2048  # tokens of a request, by default, where the positions of a model are not limited
_NEW = 256  # tokens that are written for a request, if it does not say
# What requests call the most tokens to write; the first that is there counts.
_MOST = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_log = logging.getLogger(__name__)


class HarnessModel(TemplateLM):
    """A trained model for lm-evaluation-harness.

        lm = HarnessModel(model, tokenizer, length=1024, batch_size=16)
        lm.load(params)
        lm_eval.simple_evaluate(lm, tasks=["hellaswag"])

    Args:
        model: one with a `decoding`.
        length: the most tokens of a request: what is before them is left out. None: as many
            as the model has positions for, up to 2,048.
        batch_size: how many requests are answered at once.
        place: where the programs run.
        prefix: the token that a text without another one before it follows. None: the end token.
        begins: whether every text begins with `prefix`.
        template: of chats, for `apply_chat_template=True`.
        stop_tokens: tokens that end an answer, beside the tokenizer's own.
        seed: of the texts that are drawn.

    Raises:
        ValueError: the model writes no text, the length is above its positions, or the layout does
            not fit.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        length: int | None = None,
        batch_size: int = 8,
        place: Place | None = None,
        prefix: int | None = None,
        begins: bool = False,
        template: Template | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        most = None if model.decoding is None else model.decoding.max_length
        self.model, self.max_length = model, length or min(LENGTH, most or LENGTH)
        # What scores texts and what writes them read the same parameters: as a scorer has them.
        self.batch_size, self._place = batch_size, replace(place or Place(), unrolls=False)
        sizes: dict[str, Any] = {"length": self.max_length, "batch_size": batch_size}
        self.scorer = LikelihoodScorer(model, **sizes, place=self._place)
        assert model.decoding is not None
        # The encoder of T5 reads a text with its end token, apart from the one that follows.
        self.backend = "causal" if model.decoding.start is None else "seq2seq"
        self._encodes = model.decoding.empty is None
        self._tokenizer, self._template, self._stop_tokens = tokenizer, template, stop_tokens
        self._prefix, self._begins, self._seed = prefix, begins, seed
        self._writer: RowWriter | None = None  # compiled for the first text that is to be written

    def load(self, params: Any) -> None:
        """Takes parameters: a tree as the model's `init` returns; it is donated."""
        self.scorer.load(params)
        self._writer = None

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return self._tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The token that a text without another one before it follows."""
        return self._tokenizer.end if self._prefix is None else self._prefix

    @property
    def tokenizer_name(self) -> str:
        """A text that differs if the tokens may differ."""
        return self._tokenizer.identity

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Returns the tokens of a text.

        Args:
            add_special_tokens: whether those at its ends may be added. None: they may.
        """
        (encoded,) = self._tokenizer.encode([string.encode()])
        tokens = [int(token) for token in encoded]
        special = add_special_tokens is not False
        if not (special and self.backend == "seq2seq"):
            tokens.pop()  # the end token
        if special and self._begins and tokens[:1] != [self.prefix_token_id]:
            tokens.insert(0, self.prefix_token_id)
        return tokens

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **options: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(before or [self.prefix_token_id], text) for _, before, text in requests]
        answers = [(each.total, each.greedy) for each in self._scored(pairs, disable_tqdm)]
        for (request, *_), answer in zip(requests, answers, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the logarithm of the probability of each whole text.

        A long one is read in windows, each of whose tokens is scored once.
        """
        texts = [request.args[0] for request in requests]
        windows = [
            (number, *make_disjoint_window(pair))
            for number, text in enumerate(texts)
            for pair in get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
        ]
        totals = [0.0] * len(texts)
        pairs = [(before, text) for _, before, text in windows]
        for (number, *_), each in zip(windows, self._scored(pairs, disable_tqdm), strict=True):
            totals[number] += each.total
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _scored(
        self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], quiet: bool
    ) -> list[Likelihood]:
        with tqdm(total=len(pairs), desc="texts", disable=quiet) as bar:
            found = self.scorer.score(pairs, lambda done: bar.update(done - bar.n))
        self._note_left_out([each.left_out for each in found])
        return found

    def _note_left_out(self, left_out: Sequence[int]) -> None:
        if too_long := [count for count in left_out if count]:
            _log.warning(
                "%s of %s texts do not fit the length of %s: up to %s tokens are left out at "
                "their starts",
                *(f"{n:,}" for n in (len(too_long), len(left_out), self.max_length, max(too_long))),
            )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the text that follows each request, up to what it is to end before.

        Raises:
            ValueError: a request asks for what is not supported, or for more tokens than fit.
        """
        if not requests:
            return []
        writer = self._writer_of_texts()
        events: queue.Queue[tuple[int, Event]] = queue.Queue()
        texts, left_out = [], []
        for number, request in enumerate(requests):
            context, options = request.args
            text, left = self._request(number, context, options, events)
            texts.append(text)
            left_out.append(left)
        self._note_left_out(left_out)
        engine = Engine(writer, waiting=len(texts))
        engine.start()
        try:
            engine.submit(texts)
            self._wait(engine, requests, texts, events, disable_tqdm)
        finally:
            engine.close()
        return [each.text.written for each in texts]

    def _wait(
        self,
        engine: Engine,
        requests: Sequence[Any],
        texts: Sequence[Request],
        events: queue.Queue[tuple[int, Event]],
        quiet: bool,
    ) -> None:
        """Waits until all texts are written."""
        left = len(texts)
        with tqdm(total=left, desc="texts", disable=quiet) as bar:
            while left:
                number, event = events.get()
                if event.finish == "failed":
                    raise engine.error or RuntimeError("the engine has stopped")
                if event.finish is not None:
                    left -= 1
                    bar.update()
                    written = texts[number].text.written
                    self.cache_hook.add_partial("generate_until", requests[number].args, written)

    def _request(
        self,
        number: int,
        context: str,
        options: Mapping[str, Any],
        events: queue.Queue[tuple[int, Event]],
    ) -> tuple[Request, int]:
        """Returns the request of a text, and how many tokens at its start are left out."""
        sampling, stop, most = self._settings(options)
        room = self.max_length if self._encodes else self.max_length - most
        if room < 1 or most > self.max_length:
            raise ValueError(
                f"a request asks for {most:,} tokens, but the length is {self.max_length:,}: give "
                "more `length`, or let the task ask for fewer (`max_gen_toks`)"
            )
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        text = Text(context, self._tokenizer, stop, self._stop_tokens)
        request = Request(
            prompt=tokens[-room:],
            text=text,
            sampling=sampling,
            most=most,
            listener=lambda event: events.put((number, event)),
            number=number,
        )
        return request, max(0, len(tokens) - room)

    def _settings(self, options: Mapping[str, Any]) -> tuple[Sampling, list[str], int]:
        """Returns how tokens are chosen, before what a text ends, and its most tokens.

        Raises:
            ValueError: something else is asked for.
        """
        given = {name: value for name, value in options.items() if value is not None}
        mosts = [int(given.pop(name)) for name in _MOST if name in given]
        until = given.pop("until", [])
        draws = given.pop("do_sample", float(given.get("temperature", 0)) > 0)
        chosen = {name: given.pop(name) for name in _SAMPLING if name in given}
        if given.get("num_beams") == 1:
            del given["num_beams"]
        if given:
            unknown = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(
                f"generation_kwargs of a task that are not supported: {unknown}; it takes "
                f"{', '.join(('until', 'do_sample', *_MOST[:1], *_SAMPLING))}"
            )
        if not draws:
            chosen["temperature"] = 0.0
        sampling = Sampling(**chosen, seed=self._seed)
        stop = [until] if isinstance(until, str) else list(until)
        return sampling, [text for text in stop if text], mosts[0] if mosts else _NEW

    def _writer_of_texts(self) -> RowWriter:
        if self._writer is None:
            if self.scorer.params is None:
                raise ValueError("the model has no parameters: load(params) first")
            writer = RowWriter(
                self.model, context=self.max_length, rows=self.batch_size, place=self._place
            )
            writer.take(self.scorer.params)
            self._writer = writer
        return self._writer

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns what names the template of chats; an empty text if there is none."""
        return self.tokenizer_name if chat_template and self._template is not None else ""

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a chat's messages, by the template.

        Args:
            add_generation_prompt: whether an answer is to begin. Else the last message goes on.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                "the tokenizer of this model has no chat template: give one as `template`"
            )
        try:
            text = self._template(chat_history, answers=add_generation_prompt)
        except Unfit as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from None
        if add_generation_prompt:
            return text
        last = str(chat_history[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)]
