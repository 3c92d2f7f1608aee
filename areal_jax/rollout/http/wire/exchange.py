"""Requests and their answers, independent of the dialect that they are written in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np

from areal_jax.columns import ROUTED_EXPERTS, Column, ColumnArrays, check, check_alike, find, join
from areal_jax.errors import UserError
from areal_jax.files import JsonObject
from areal_jax.models.families import ModelConfig
from areal_jax.types import TokenScores, concatenate

INCARNATION = 'X-Areal-Incarnation'  # header: the one server process that a request is meant for
ASKED = 'return_{}'  # field of a body that requests a column of this name
MISSED = 'X-Areal-Missed'  # header of a reply: fields of the request whose wishes its answers miss

FinishWord = Literal['stop', 'length', 'abort']


class RequestError(UserError):
    """A refused body: one sentence that names the field, its value and the fix."""

    def __init__(self, field: str, message: str, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status


class ReplyError(UserError):
    """A reply of a server that can not be used: the tokens in it are lost."""


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str  # 'system', 'user', 'assistant', 'tool': the chat template knows them
    content: str
    tool_calls: tuple[JsonObject, ...] = ()  # of an assistant; arguments are objects, or text if they are not
    tool_call_id: str = ''  # of a tool: the call that it answers, and the name of the function
    name: str = ''

    def describe(self) -> JsonObject:
        """Returns the turn as chat templates expect it."""
        optional = {'tool_calls': list(self.tool_calls), 'tool_call_id': self.tool_call_id, 'name': self.name}
        turn: JsonObject = {'role': self.role, 'content': self.content}
        return turn | {name: value for name, value in optional.items() if value}


@dataclasses.dataclass(frozen=True)
class Wish:
    """A requirement on an answer that sampling cannot guarantee: a tool call, or JSON."""

    field: str  # of the request, with its value
    value: object
    kind: Literal['call', 'json']
    sentence: str  # the instruction to the model
    fix: str  # for a server that does not serve wishes
    tool: str = ''  # name of the tool that must be called; '' = any


UNKNOWN = -1  # in signed integers, instead of the column's fill value: not recorded


@dataclasses.dataclass(frozen=True)
class ColumnForm:
    """The form of a model's column. Rows are [rows, *shape], one for each token that was read."""

    axes: ClassVar[str] = ''  # of a row, for errors
    column: Column  # of ModelConfig.columns

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of one row."""
        assert self.column.shape is not None
        return self.column.shape

    @property
    def sent_rows(self) -> tuple[tuple[int, ...], ...]:
        """The shapes in which servers may send one row."""
        return (self.row,)

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """The dtypes of sent files; the column's dtype first."""
        return (self.column.dtype,)

    def pick(self, rows: np.ndarray) -> np.ndarray:
        """Converts rows of any sent shape to this shape."""
        return rows

    def find_fault(self, rows: np.ndarray, length: int, of_prompt: int) -> str:
        """Describes the fault of rows, of which there must be `length`; '' = none.

        Each of the first `of_prompt` rows may be unknown: all its values are the column's fill value, or UNKNOWN.
        """
        if rows.ndim != 1 + len(self.row) or rows.shape[1:] != self.row:
            return f'the shape {rows.shape}, and rows of this model are {self.row}{self.axes}'
        return f'{len(rows)} rows where {length} belong' if len(rows) != length else ''

    def convert(self, rows: np.ndarray) -> np.ndarray:
        """Converts rows without a fault to the dtype of the column."""
        return np.where(rows == self.unknown(rows), self.column.fill, rows).astype(self.column.dtype)

    def unknown(self, rows: np.ndarray) -> float:
        """The value that marks unknown entries in these rows."""
        return UNKNOWN if rows.dtype.kind == 'i' else self.column.fill


@dataclasses.dataclass(frozen=True)
class RouteForm(ColumnForm):
    """The form of ROUTED_EXPERTS. A row is [layers with experts, choices]."""

    axes: ClassVar[str] = ' (layers with experts, choices)'
    experts: int
    layers: tuple[int, ...]  # layers with experts, ascending
    n_layers: int  # all layers

    @classmethod
    def of(cls, shape: ModelConfig) -> RouteForm:
        """Returns the form for a model with experts."""
        assert shape.experts is not None
        layers = tuple(filter(shape.has_experts, range(shape.n_layers)))
        return cls(shape.routes, shape.experts.count, layers, shape.n_layers)

    @property
    def sent_rows(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of a sent row: other servers send all layers, with any values for layers without experts."""
        return self.row, (self.n_layers, self.row[1])

    @property
    def sent_dtypes(self) -> tuple[str, ...]:
        """The dtypes of sent files: the column's; vLLM's uint8, even with an id of 255, and int16 of older versions."""
        return self.column.dtype, 'uint8', 'int16'

    def pick(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, list(self.layers)] if rows.shape[1:2] == (self.n_layers,) else rows

    def find_fault(self, rows: np.ndarray, length: int, of_prompt: int) -> str:
        if fault := super().find_fault(rows, length, of_prompt):
            return fault
        known = ~(rows == self.unknown(rows)).all(axis=(1, 2))
        known[of_prompt:] = True
        outside = known[:, None, None] & ((rows < 0) | (rows >= self.experts))
        if outside.any():
            row, layer, choice = np.argwhere(outside)[0].tolist()
            return f'the expert {rows[row, layer, choice]} in row {row}, which is none from 0 to {self.experts - 1}'
        ordered = np.sort(rows, axis=-1)
        twice = known[:, None] & (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
        if twice.any():
            row, layer = np.argwhere(twice)[0].tolist()
            return f'an expert twice in row {row}: {rows[row, layer].tolist()}'
        return ''


def list_forms(shape: ModelConfig) -> dict[str, ColumnForm]:
    """Lists the forms of a model's published columns by name."""
    form = lambda column: RouteForm.of(shape) if column.name == ROUTED_EXPERTS.name else ColumnForm(column)
    return {column.name: form(column) for column in shape.columns if column.published}


Prompt = np.ndarray | str | tuple[Message, ...]  # token ids int32 [P], P >= 1; or input of a tokenizer


@dataclasses.dataclass(frozen=True)
class CallSampling:
    """The requested sampling of the answers to one prompt, without the model's EOS ids."""

    max_new_tokens: int | None  # None = as many as the context has room for; 0 = the prompt is scored only
    min_new_tokens: int = 0  # EOS and stop ids can not be drawn before
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1.0 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1.0 = off; of prompt and answer
    presence_penalty: float = 0.0  # 0 = off; of the answer, like the next
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    stop_tokens: tuple[int, ...] = ()  # end an answer, in addition to the model's EOS ids
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False  # the model's EOS ids do not end an answer
    seed: int | None = None
    skip_special_tokens: bool = True  # in the text of an answer, like the next
    keep_stop: bool = False  # the matched stop string stays in the text; tokens always stay


@dataclasses.dataclass(frozen=True)
class Call:
    """One request: `n` answers to each prompt; the answers to a prompt have consecutive numbers."""

    prompts: tuple[Prompt, ...]
    prompt_field: str  # the dialect's name of the prompt, for errors
    sampling: tuple[CallSampling, ...]  # one per prompt
    request_ids: tuple[str, ...]  # one per answer; '' = the server makes one
    tools: tuple[JsonObject, ...] = ()  # shown to the model by the chat template; the model may call them
    one_tool_call: bool = False  # the reply has the first call of an answer only
    wishes: tuple[Wish, ...] = ()
    adds_special: bool = True  # text prompts get the special tokens that the tokenizer adds around texts
    fits_limit: bool = False  # a limit of new tokens is lowered to the room in the context
    ignored: tuple[str, ...] = ()  # fields that were sent and have no influence
    template_values: tuple[str, ...] = ()  # names of values for the chat template, which must not read them
    model: str = ''  # echoed
    n: int = 1
    is_batch: bool = False  # the prompts came in a list, possibly of one entry
    stream: bool = False
    stream_usage: bool = False  # OpenAI: a last event with the usage
    logprobs: bool = False  # wanted in the reply
    columns: tuple[str, ...] = ()  # of tokens, wanted in the reply too
    first_row: int = 0  # first prompt token whose entries in columns of the model are wanted
    forms: Mapping[str, ColumnForm] = dataclasses.field(default_factory=dict)  # of these columns, for the client
    echo: bool = False  # OpenAI: the prompt is part of the text, and of the log-probs
    prompt_texts: tuple[str, ...] = ()  # one per prompt, of a tokenized call with `echo`
    alternatives: int = 0  # k likeliest tokens at each generated token, and at prompt tokens with log-probs
    prompt_logprobs: int | None = None  # vLLM: k likeliest at each prompt token, in a separate list; None = no list
    prompt_starts: tuple[int, ...] = ()  # one per prompt: first token of its log-probs, which is null; -1 = no list
    text_in_logprobs: bool = False
    tokens_as_ids: bool = False  # OpenAI: tokens in log-probs are named 'token_id:N'
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    session: str = ''  # key of the conversation, for routing
    cache_salt: str = ''  # prompts with different salts share no KV
    priority: int = 0
    draw: int = 0  # the noise of an answer is a function of (seed, draw, sample, token position), as in a run
    sample: int = 0  # of the first answer

    @property
    def token_columns(self) -> tuple[str, ...]:
        """The columns with an entry for each generated token only."""
        return tuple(name for name in self.columns if find(name).shape is not None)

    @property
    def model_columns(self) -> tuple[str, ...]:
        """The columns whose shape the model sets: they have an entry for each token that was read."""
        return tuple(name for name in self.columns if find(name).shape is None)

    def prompt_start(self, answer: int) -> int:
        """Returns the start of the log-probs of an answer's prompt; without a list, the length of the prompt."""
        prompt = answer // self.n
        start = self.prompt_starts[prompt] if self.prompt_starts else -1
        length = len(self.prompts[prompt])
        return length if start < 0 else min(start, length)

    def scored_from(self, answer: int) -> int:
        """Returns the first prompt token of an answer whose log-prob is wanted; if none is, the prompt's length."""
        return min(self.prompt_start(answer) + 1, len(self.prompts[answer // self.n]))

    @property
    def prompt_alternatives(self) -> int:
        """The number k of likeliest tokens that a scoring pass returns for prompt tokens."""
        return max(self.alternatives, self.prompt_logprobs or 0)

    @property
    def n_answers(self) -> int:
        return len(self.prompts) * self.n


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer."""

    id: str  # unique
    name: str
    arguments: str  # a JSON object, as the model wrote it
    after: int = 0  # number of characters of its piece's text before it


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """The model's reasoning before its answer, if its notation separates the two."""

    text: str


Part = str | ToolCall | Reasoning  # of an answer; a str is text for the reader


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive tokens of an answer under one version of the weights, n >= 0 of them. Made by the server."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], of the full softmax at the temperature
    version: str  # '' = the server did not say
    columns: ColumnArrays = dataclasses.field(default_factory=dict)  # further values of each token
    text: str = ''  # added to the answer's text; a character is in the piece that completes it
    calls: tuple[ToolCall, ...] = ()  # completed by the piece; their notation is not in the text
    reasoning: str = ''  # all of the answer's reasoning, which precedes its text
    context: ColumnArrays = dataclasses.field(default_factory=dict)  # of the prompt, with the first piece of an answer

    def __post_init__(self) -> None:
        check(self.columns, (len(self.tokens),))
        check_alike(self.context)

    @property
    def parts(self) -> list[Part]:
        """Reasoning, text and calls in the order of the answer."""
        found: list[Part] = [Reasoning(self.reasoning)] if self.reasoning else []
        end = 0
        for call in self.calls:
            found += [self.text[end : call.after], call]
            end = call.after
        return [part for part in [*found, self.text[end:]] if part]


def join_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbouring pieces that have the same version and the same columns."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if groups and _is_continued(groups[-1][-1], piece):
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _is_continued(piece: Piece, following: Piece) -> bool:
    return piece.version == following.version and piece.columns.keys() == following.columns.keys()


def _join(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        concatenate([piece.tokens for piece in pieces], np.int32),
        concatenate([piece.logprobs for piece in pieces], np.float32),
        pieces[0].version,
        join([piece.columns for piece in pieces]),
        ''.join(piece.text for piece in pieces),
        tuple(_join_calls(pieces)),
        ''.join(piece.reasoning for piece in pieces),
        pieces[0].context,
    )


def _join_calls(pieces: Sequence[Piece]) -> Iterator[ToolCall]:
    before = 0
    for piece in pieces:
        for call in piece.calls:
            yield dataclasses.replace(call, after=before + call.after)
        before += len(piece.text)


@dataclasses.dataclass
class Written:
    """The content of earlier events, for a dialect whose events repeat everything or number their parts."""

    events: int = 0
    parts: int = 0  # of the answer's parts, begun
    in_text: bool = False  # the last of them is a text that continues
    tokens: int = 0
    characters: int = 0  # of the answer's text
    text: str = ''  # without quotes
    lists: dict[str, str] = dataclasses.field(default_factory=dict)  # by field, without brackets


@dataclasses.dataclass(frozen=True)
class Finish:
    """The end of an answer."""

    reason: FinishWord
    matched: int | str | None = None  # the stop id or string
    message: str = ''  # of an abort


@dataclasses.dataclass(frozen=True)
class Span:
    """Output tokens [start, end), drawn under this version."""

    version: str
    start: int
    end: int


@dataclasses.dataclass
class Answer:
    """One answer, as far as it is received."""

    request_id: str
    prompt_tokens: np.ndarray  # int32 [P]
    index: int = 0  # among the answers of the call
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    finish: Finish | None = None  # None while it is generated
    version: str = ''  # of the server's weights when it ended
    cached_tokens: int = 0  # prompt tokens whose KV was cached
    retractions: int = 0  # times that its KV was dropped and computed again
    latency_s: float = 0.0  # from the arrival of the request
    prompt_text: str = ''  # of a call with `echo`
    prompt_scores: TokenScores | None = None  # of the prompt tokens from Call.scored_from on
    scored_version: str = ''  # of the weights of these scores
    alternatives: TokenScores | None = None  # of the generated tokens; None = their weights are no longer in use
    began: int = -1  # number of the weights in use when it began
    written: Written = dataclasses.field(default_factory=lambda: Written(), repr=False, compare=False)

    def add(self, piece: Piece) -> None:
        """Appends a piece. Joins pieces of one version so that few are left, and an event need not visit many."""
        pieces = self.pieces
        pieces.append(piece)
        while len(pieces) > 1 and _is_continued(*pieces[-2:]) and len(pieces[-2].tokens) <= len(pieces[-1].tokens):
            pieces[-2:] = join_pieces(pieces[-2:])

    def prompt_logprobs(self, length: int) -> list[float | None]:
        """Returns the log-probs of the last `length` tokens of the prompt; None for leading tokens without one."""
        found = [] if self.prompt_scores is None else self.prompt_scores.logprobs.tolist()
        return [*[None] * (length - len(found)), *found]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens, int32 [n]."""
        return concatenate([piece.tokens for piece in self.pieces], np.int32)

    @property
    def n_tokens(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)

    @property
    def logprobs(self) -> np.ndarray:
        """The log-probs of the full softmax, float32 [n]."""
        return concatenate([piece.logprobs for piece in self.pieces], np.float32)

    def column(self, column: Column) -> np.ndarray:
        """Returns the column's values, [n, *shape]."""
        return np.concatenate([column.blank(0), *(column.of(p.columns, p.logprobs) for p in self.pieces)])

    @property
    def text(self) -> str:
        return ''.join(piece.text for piece in self.pieces)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(call for piece in self.pieces for call in piece.calls)

    @property
    def reasoning(self) -> str:
        return ''.join(piece.reasoning for piece in self.pieces)

    @property
    def parts(self) -> list[Part]:
        """Reasoning, text and calls in their order; neighbouring texts are joined."""
        found: list[Part] = []
        for part in (part for piece in self.pieces for part in piece.parts):
            if found and isinstance(part, str) and isinstance(found[-1], str):
                found[-1] += part
            else:
                found.append(part)
        return found

    @property
    def spans(self) -> list[Span]:
        """The spans of versions, without gaps; neighbours have different versions."""
        found: list[Span] = []
        end = 0
        for piece in self.pieces:
            start, end = end, end + len(piece.tokens)
            if found and found[-1].version == piece.version:
                found[-1] = Span(piece.version, found[-1].start, end)
            elif end > start:
                found.append(Span(piece.version, start, end))
        return found


@dataclasses.dataclass(frozen=True)
class ReplyInfo:
    """The server's facts in a reply."""

    model: str  # name of the served model, for calls that name none
    created_s: int  # seconds since 1970
    token_text: Callable[[int], str] | None = None  # text of one token, for log-probs with text


def name_answers(call: Call, request_id: str) -> Call:
    """Returns the call with ids made from `request_id` if it lacks any; several answers are numbered."""
    if all(call.request_ids):
        return call
    numbered = tuple(f'{request_id}_{index}' for index in range(call.n_answers))
    return dataclasses.replace(call, request_ids=numbered if call.n_answers > 1 else (request_id,))


def count_usage(call: Call, answers: Sequence[Answer]) -> dict[str, int]:
    """Counts the tokens of a reply as vLLM and OpenAI do: the prompt of n answers once."""
    prompt = sum(len(answer.prompt_tokens) for answer in answers[:: call.n])
    completion = sum(answer.n_tokens for answer in answers)
    return {'prompt_tokens': prompt, 'completion_tokens': completion, 'total_tokens': prompt + completion}


def tokenize_call(
    call: Call,
    encode: Callable[[str], Sequence[int] | np.ndarray],
    apply_template: Callable[[Sequence[Message], Sequence[JsonObject]], Sequence[int] | np.ndarray],
) -> Call:
    """Returns the call with token ids instead of texts and messages; raises RequestError if a prompt has no tokens."""
    prompts = []
    for prompt in call.prompts:
        if not isinstance(prompt, np.ndarray):
            ids = encode(prompt) if isinstance(prompt, str) else apply_template(prompt, call.tools)
            prompt = np.asarray(ids, np.int32)
        if not len(prompt):
            raise RequestError(call.prompt_field, f'{call.prompt_field} has no token: send at least one')
        prompts.append(prompt)
    return dataclasses.replace(call, prompts=tuple(prompts))
