"""The coding of a teacher's answers: the top K log-probabilities of each token, with the ids of their classes.

How it works
1. `parse_logits` makes a `LogitCoding` of a SPEC, such as `top:32+int8`.
2. `encode` makes a record of each token. Records of one coding and one number of classes have the same size, so an array of
   them can be kept, cut and joined.
3. `pack` puts a header before records. `open` checks a payload against what the receiver asked for: SPEC, classes, tokens.

Rules
- No length that a peer states is used: a receiver computes each size from what it asked for.
- A valid record decodes to finite values, at most 0, of rising classes, whose probabilities sum to at most 1 up to rounding.
  So no teacher can make a loss NaN or infinite by its answer.
"""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from narrows.compression.buffers import ByteArray, Payload, bytes_view, read_only
from narrows.compression.errors import NonFiniteError, PayloadError, SpecError
from narrows.compression.logits.kernels import (
    FAULT_BITS,
    GIVEN_SUM_MAX,
    OF_HEAD,
    OF_IDS,
    OF_SPARE_CODE,
    OF_VALUES,
    PLACE_BITS,
    Ids,
    Matrix,
    read_records,
    write_records,
)
from narrows.compression.logits.layout import (
    CLASSES_MAX,
    HEADER,
    LAYOUT_VERSION,
    TOKENS_MAX,
    TOP_MAX,
    VALUE_CODINGS,
    LogitValueCoding,
    id_section,
)

SYNTAX = f"top:K+CODING, with K from 1 to {TOP_MAX} and CODING one of {', '.join(VALUE_CODINGS)}"
ABOVE_ZERO_MAX = 1e-3  # a log-probability that rounding has put above 0
FAULTS = {
    OF_HEAD: "has a share of the other classes or a span that is out of range",
    OF_VALUES: "has a value that is not finite, or none that is the largest",
    OF_SPARE_CODE: "has bits set after its last value",
    OF_IDS: "has ids that are not {top} rising classes below {classes}",
}

_TOP = re.compile(r"\d{1,4}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogitCoding:
    """Codes the `top` largest log-probabilities of each token. It has no state, so one object serves all threads."""

    top: int
    values: LogitValueCoding

    @property
    def spec(self) -> str:
        """The SPEC in its canonical form, as `parse_logits` reads it."""
        return f"top:{self.top}+{self.values.spec}"

    def kept(self, classes: int) -> int:
        """Return K', the classes of a record: K, or all of fewer. Raises ValueError if `classes` is out of range."""
        if not 1 <= classes <= CLASSES_MAX:
            raise ValueError(f"log-probabilities are over 1 to {CLASSES_MAX} classes, not {classes}")
        return min(self.top, classes)

    def record_bytes(self, classes: int) -> int:
        """Return the bytes of the record of one token.

        Args:
            classes: the number of classes V that the teacher chooses from.

        Raises:
            ValueError: `classes` is out of range.
        """
        top = self.kept(classes)
        return self.values.byte_count(top) + id_section(top, classes)[1]

    def encode(self, log_probs: npt.NDArray[Any], ids: npt.NDArray[Any], classes: int) -> ByteArray:
        """Encode the largest log-probabilities of each token.

        The decoded probabilities of a token sum to the given ones, within a thousandth; to 1 if these sum above it, and to
        6e-8 if they sum below that. With int8 and int4, values more than 16 and 12 nats below the largest of their token
        decode to so much below it.

        Args:
            log_probs: float32[tokens, K'], K' = min(top, classes): at most 0 up to rounding, in any order.
            ids: integers [tokens, K'], the class of each; different ones in a token.
            classes: the number of classes; ids are below it.

        Returns:
            The records, uint8[tokens, record_bytes(classes)].

        Raises:
            TypeError: an array has another dtype or shape.
            NonFiniteError: a log-probability is NaN or infinite.
            ValueError: a log-probability is above 0, the probabilities of a token sum above 1.05, an id is not below
                `classes`, or a token has an id twice.
        """
        top = self.kept(classes)
        _check_given(log_probs, ids, top)
        if not np.isfinite(log_probs).all():
            token, place = (int(at) for at in np.argwhere(~np.isfinite(log_probs))[0])
            raise NonFiniteError(
                f"log-probability {log_probs[token, place]} of token {token} is NaN or infinite; leave such tokens "
                "out, and give a class that cannot be a finite one, such as -1e4"
            )
        out: ByteArray = np.zeros((log_probs.shape[0], self.record_bytes(classes)), np.uint8)
        if not out.shape[0]:
            return out
        if log_probs.max() > ABOVE_ZERO_MAX:
            raise ValueError(f"a log-probability is {log_probs.max()}, above 0: give log_softmax(logits), not logits")
        keys = _sort_keys(ids, classes)
        wrong = write_records(
            read_only(np.ascontiguousarray(log_probs)),
            read_only(keys),
            id_section(top, classes)[0],
            self.values.code_bits,
            np.float32(self.values.deepest),
            self.values.guesses,
            self.values.middles,
            self.values.byte_count(top),
            classes - top,
            out,
        )
        if wrong >= 0:
            raise ValueError(
                f"the probabilities of token {wrong} sum above {GIVEN_SUM_MAX}: give log_softmax(logits) over all classes"
            )
        return out

    def check(self, records: ByteArray, classes: int) -> None:
        """Check records. Any bytes are safe to pass.

        Args:
            records: uint8[tokens, record_bytes(classes)].
            classes: the number of classes.

        Raises:
            PayloadError: a record is not valid, or records have another size.
        """
        top = self.kept(classes)
        self._read(records, classes, np.empty((1, top), np.float32), np.empty((1, top), np.int64))

    def decode(self, records: ByteArray, classes: int) -> tuple[Matrix, Ids]:
        """Decode records. They are checked again, since they may come from a file.

        Args:
            records: uint8[tokens, record_bytes(classes)].
            classes: the number of classes.

        Returns:
            The log-probabilities, float32[tokens, K'], finite and at most 0; and their classes, int64[tokens, K'], rising.

        Raises:
            PayloadError: a record is not valid, or records have another size. Never after `check` or `open`.
        """
        shape = (self._tokens(records, classes), self.kept(classes))
        log_probs, ids = np.empty(shape, np.float32), np.empty(shape, np.int64)
        self._read(records, classes, log_probs, ids)
        return log_probs, ids

    def pack(self, records: ByteArray, classes: int) -> bytes:
        """Return the payload of records: a header and the records.

        Args:
            records: uint8[tokens, record_bytes(classes)], as `encode` makes them. They are not checked.
            classes: the number of classes.

        Raises:
            PayloadError: records have another size.
        """
        tokens = self._tokens(records, classes)
        return self._header(classes, tokens) + np.ascontiguousarray(records).tobytes()

    def open(self, payload: Payload, classes: int, tokens: int, check: bool = True) -> ByteArray:
        """Check a payload.

        Args:
            payload: any C-contiguous buffer, not trusted.
            classes: the number of classes that is expected.
            tokens: the number of tokens that is expected.
            check: False: records are not read, for `decode` checks them; the header and the size are checked all the same.

        Returns:
            The records, uint8[tokens, record_bytes(classes)], read-only. They borrow the memory of the payload, which must
            not change meanwhile.

        Raises:
            PayloadError: the payload is not a valid answer with this SPEC to so many tokens of so many classes.
        """
        data, size = bytes_view(payload), self.record_bytes(classes)
        if data.size < HEADER.size:
            raise PayloadError(f"answer is truncated: {data.size} bytes are fewer than a header's {HEADER.size}")
        header = HEADER.unpack(data[: HEADER.size].tobytes())
        wanted = (LAYOUT_VERSION, self.values.wire_id, self.kept(classes), classes, tokens)
        for name, found, expected in zip(_FIELDS, header, wanted, strict=True):
            if found != expected:
                raise PayloadError(f"answer has {name} {found} where {expected} is expected, for {self.spec}")
        if data.size != HEADER.size + tokens * size:
            raise PayloadError(
                f"answer is truncated or too long: {data.size} bytes, where {tokens} tokens of {size} bytes each take "
                f"{HEADER.size + tokens * size} with the header"
            )
        records = data[HEADER.size :].reshape(tokens, size)
        if check:
            self.check(records, classes)
        return records

    def _header(self, classes: int, tokens: int) -> bytes:
        return HEADER.pack(LAYOUT_VERSION, self.values.wire_id, self.kept(classes), classes, tokens)

    def _tokens(self, records: ByteArray, classes: int) -> int:
        """Return the number of records. Raises PayloadError if they are not of this coding and so many classes."""
        size = self.record_bytes(classes)
        if records.dtype != np.uint8 or records.ndim != 2 or records.shape[1] != size or len(records) > TOKENS_MAX:
            raise PayloadError(
                f"records of {self.spec} over {classes} classes are uint8[tokens, {size}], not "
                f"{records.dtype}{list(records.shape)}"
            )
        return len(records)

    def _read(self, records: ByteArray, classes: int, log_probs: Matrix, ids: Ids) -> None:
        """Read records into arrays of as many rows, or of one row. Raises PayloadError if one is not valid."""
        tokens, top = self._tokens(records, classes), self.kept(classes)
        if not tokens:
            return
        found = read_records(
            read_only(np.ascontiguousarray(records).reshape(-1)),
            records.shape[1],
            id_section(top, classes)[0],
            self.values.code_bits,
            self.values.fractions,
            self.values.byte_count(top),
            classes - top,
            log_probs,
            ids,
        )
        if found >= 0:
            fault = FAULTS[found & (1 << FAULT_BITS) - 1].format(top=top, classes=classes)
            raise PayloadError(f"answer is corrupt: the record of token {found >> FAULT_BITS} {fault}")


_FIELDS = ("layout version", "value coding", "top", "classes", "tokens")


def _check_given(log_probs: npt.NDArray[Any], ids: npt.NDArray[Any], top: int) -> None:
    """Raise TypeError unless the arrays are float32[tokens, top] and integers of the same shape."""
    if log_probs.dtype != np.float32 or log_probs.ndim != 2 or log_probs.shape[1] != top:
        raise TypeError(f"log_probs must be float32[tokens, {top}], not {log_probs.dtype}{list(log_probs.shape)}")
    if ids.dtype.kind not in "iu" or ids.shape != log_probs.shape:
        raise TypeError(f"ids must be integers {list(log_probs.shape)} as log_probs, not {ids.dtype}{list(ids.shape)}")


def _sort_keys(ids: npt.NDArray[Any], classes: int) -> npt.NDArray[np.uint64]:
    """Return the sort keys of `write_records`. Raises ValueError for an id that is out of range or comes twice."""
    if ids.min() < 0 or ids.max() >= classes:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"class id {wrong} is not below {classes}, the number of classes")
    keys = ids.astype(np.uint64)
    keys <<= np.uint64(PLACE_BITS)
    keys |= np.arange(ids.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    doubled = (keys[:, 1:] ^ keys[:, :-1]) < np.uint64(1 << PLACE_BITS)  # they differ in their places alone
    if doubled.any():
        token, place = np.argwhere(doubled)[0]
        wrong = keys[token, place] >> np.uint64(PLACE_BITS)
        raise ValueError(f"class id {wrong} comes twice in token {token}; a token has each class once")
    return keys


def parse_logits(spec: str) -> LogitCoding:
    """Return the coding of a SPEC.

    Args:
        spec: the SPEC, for example "top:32+int8".

    Raises:
        SpecError: the SPEC is wrong. The sentence names the part that is, and the syntax.
    """
    first, *rest = spec.split("+")
    name, colon, text = first.partition(":")
    where = f"SPEC {spec!r}"
    if name != "top" or not colon:
        raise SpecError(f"{where}: {first!r} does not say how many classes of a token are kept; write {SYNTAX}")
    if not _TOP.fullmatch(text) or not 1 <= int(text) <= TOP_MAX:
        raise SpecError(f"{where}: K is {text!r}, and must be a whole number from 1 to {TOP_MAX}; write {SYNTAX}")
    if len(rest) != 1:
        raise SpecError(f"{where}: {'more than one' if rest else 'no'} value coding follows {first!r}; write {SYNTAX}")
    if rest[0] not in VALUE_CODINGS:
        raise SpecError(f"{where}: value coding {rest[0]!r} is not known; write {SYNTAX}")
    return LogitCoding(int(text), VALUE_CODINGS[rest[0]])
