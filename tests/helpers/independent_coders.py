"""The coders of the independent reader, written from docs/format.md, sections 9 to 11."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

M = 1 << 15


class Refused(Exception):
    """The checkpoint breaks a rule of the format."""


def require(condition: bool, rule: str) -> None:
    if not condition:
        raise Refused(rule)


class Bits:  # a bit stream, section 9
    def __init__(self, data: bytes) -> None:
        self.value, self.size, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def field(self, width: int) -> int:
        require(self.at + width <= self.size, "bits end early")
        self.at += width
        return (self.value >> (self.at - width)) & ((1 << width) - 1)

    def number(self) -> int:
        zeros = 0
        while self.field(1) == 0:
            zeros += 1
            require(zeros <= 15, "length of a number")
        return (1 << zeros) - 1 + self.field(zeros)

    def ascending(self, count: int, limit: int) -> Iterator[int]:
        last = -1
        for _ in range(count):
            last += self.number() + 1
            require(last < limit, "a set within its limit")
            yield last

    def finish(self) -> None:
        require(self.size - self.at < 8 and self.value >> self.at == 0, "bits left over")


class Row(NamedTuple):
    bits: int
    starts: list[int]
    ranges: list[tuple[int, int]]  # symbol or -1 for the escape, frequency
    escaped: list[int]


def frequency(v: int) -> int:
    require(1 <= v <= 103, "frequency")
    return v if v < 16 else (8 + v % 8) << (v // 8 - 1)


class Rans:  # section 10
    def __init__(self, model: bytes) -> None:
        require(len(model) >= 5, "model")
        version, self.contexts, self.symbols = struct.unpack("<BHH", model[:5])
        require(version in (1, 2) and self.contexts <= 256 and 1 <= self.symbols <= 256, "model")
        self.version, bits = version, Bits(model[5:])
        self.rows = [self._row(bits) for _ in range(self.contexts + 1)]
        bits.finish()

    def _row(self, bits: Bits) -> Row:
        firsts, escaped, others, count = list[int](), list[int](), list[tuple[int, int]](), bits.number()
        row_bits = 15 if self.version == 1 or count == 0 else 10 + bits.field(3)
        require(row_bits <= 15, "slots of a row")
        for symbol in bits.ascending(count, self.symbols):
            v = bits.field(7)
            if v in (0, 127):
                (firsts if v else escaped).append(symbol)
            else:
                others.append((symbol, frequency(v)))
        require(len(firsts) == (count > 0), "first symbol")
        require(len(escaped) != 1 if self.version == 1 else not escaped or 255 not in firsts + [s for s, _ in others],
                "escaped symbols")
        if escaped:
            others.append((-1, frequency(bits.field(7))))
        left = sum(f for _, f in others)
        require(left < 1 << row_bits and (self.version == 1 or left <= 4095), "frequency of the first symbol")
        first = [(symbol, (1 << row_bits) - left) for symbol in firsts]
        ranges = first + others if self.version == 1 else others + first
        return Row(row_bits, [sum(f for _, f in ranges[:i]) for i in range(len(ranges))], ranges, escaped)

    def decode(self, block: bytes, n: int, previous: Sequence[int] | None) -> list[int]:
        require(previous is None or max(previous, default=-1) < self.contexts, "previous codes of the model")
        if previous is None:
            previous = [self.contexts] * n
        used = {p: self.rows[p] for p in set(previous)}
        require(all(row.starts for row in used.values()), "no code in an empty row")
        if not block and self.version == 2:
            require(all(len(row.starts) == 1 for row in used.values()), "certain codes")
            symbols = {p: row.ranges[0][0] for p, row in used.items()}
            return list(map(symbols.__getitem__, previous))
        rows = [self.rows[p] for p in previous]
        if self.version == 2 and n >= 32768:
            return self._lanes(block, rows)
        lanes = 1 if n < 4096 or self.version == 2 else 4 if n < 65536 else 8
        require(not block or (n > 0 and len(block) >= 4 * lanes and len(block) % 2 == 0), "size of a block")
        states = list(struct.unpack(f"<{lanes}I", block[: 4 * lanes])) if block else [65536] * lanes
        words = np.frombuffer(block[4 * lanes :], "<u2").tolist()[::-1]
        out = self._steps(rows, states, words)
        require(not words and set(states) == {65536}, "end of a block")
        return out

    def _lanes(self, block: bytes, rows: list[Row]) -> list[int]:
        require(len(block) >= 130 and len(block) % 2 == 0, "size of a block")
        tail, *states = struct.unpack("<H32I", block[:130])
        require(tail <= len(rows), "codes of the tail")
        words, start = np.frombuffer(block[130:], "<u2").tolist()[::-1], len(rows) - tail
        out = self._steps(rows[:start], states, words)
        require(not words and all(65536 <= x < 131072 for x in states), "end of the lanes")
        words = [x - 65536 for x in states][:1:-1]
        single = [states[0] - 65536 + 65536 * (states[1] - 65536)]
        out += self._steps(rows[start:], single, words)
        require(not any(words) and single == [65536], "end of the tail")
        return out

    def _steps(self, rows: list[Row], states: list[int], words: list[int]) -> list[int]:
        require(min(states) >= 65536, "states at the start")
        out = list[int]()
        def refilled(x: int) -> int:
            require(bool(words), "words end early")
            return 65536 * x + words.pop()
        for at in range(0, len(rows), len(states)):
            group, escapes = rows[at : at + len(states)], []
            for lane, row in enumerate(group):
                slots, x = 1 << row.bits, states[lane]
                place = bisect_right(row.starts, x % slots) - 1
                symbol, f = row.ranges[place]
                x = f * (x // slots) + x % slots - row.starts[place]
                states[lane] = x if x >= 65536 else refilled(x)
                if symbol < 0:
                    escapes.append(lane)
                    if self.version == 1:
                        symbol = self._escaped(row, states, escapes.pop(), refilled)
                out.append(symbol)
            for lane in escapes:
                out[at + lane] = self._escaped(group[lane], states, lane, refilled)
        return out

    @staticmethod
    def _escaped(row: Row, states: list[int], lane: int, refilled: Callable[[int], int]) -> int:
        slots, x = 1 << row.bits, states[lane]
        share = slots // len(row.escaped)
        require((j := x % slots // share) < len(row.escaped), "escaped symbol")
        x = share * (x // slots) + x % slots - j * share
        states[lane] = x if x >= 65536 else refilled(x)
        return row.escaped[j]


def token_row(rate: int) -> tuple[int, Row]:
    """The limit of a class, and the row of its tokens."""
    stay = [1 << 32]
    while len(stay) < 255 and stay[-1] > (1 << 32) // 20:
        stay.append(stay[-1] * ((1 << 20) - rate) // (1 << 20))
    limit = len(stay) - 1
    shares = [stay[j] - stay[j + 1] for j in range(limit)] + [stay[limit]]
    chosen: tuple[int, list[int]] = (0, [])
    for bits in range(10, 16):
        frequencies = [max(1, (2 * share + (1 << (32 - bits))) // (1 << (33 - bits))) for share in shares]
        if sum(frequencies) - max(frequencies) > 4095:
            break
        chosen = bits, frequencies
        if min(frequencies) >= 4:
            break
    bits, frequencies = chosen
    first = frequencies.index(max(frequencies))
    ranges = [(token, f) for token, f in enumerate(frequencies) if token != first]
    ranges.append((first, (1 << bits) - sum(f for _, f in ranges)))
    return limit, Row(bits, [sum(f for _, f in ranges[:i]) for i in range(len(ranges))], ranges, [])


class Changes:  # section 10
    def __init__(self, model: bytes) -> None:
        require(len(model) >= 4, "model")
        version, count, self.contexts = struct.unpack("<BBH", model[:4])
        require(version == 1 and 1 <= count <= 4 and self.contexts + count <= 256, "model")
        end = 4 + 3 * count
        rates = [int.from_bytes(model[at : at + 3], "little") for at in range(4, end, 3)]
        require(all(0 < rate < 1 << 18 for rate in rates), "rates")
        size = -(-3 * self.contexts // 8)
        require(len(model) >= end + size, "classes")
        bits = Bits(model[end : end + size])
        self.kinds = [bits.field(3) for _ in range(self.contexts)]
        bits.finish() if size else None
        require(all(kind <= count or kind == 7 for kind in self.kinds), "classes")
        self.rans = Rans(model[end + size :])
        require(self.rans.version == 2 and self.rans.contexts == self.contexts, "symbols")
        self.symbols = self.rans.symbols
        self.limits, self.rows = zip(*map(token_row, rates), strict=True)

    def decode(self, block: bytes, n: int, previous: Sequence[int] | None) -> list[int]:
        if previous is None or n == 0:
            require(n > 0 or not block, "a block of no codes")
            return self.rans.decode(block, n, None) if n else []
        require(max(previous) < self.contexts, "previous codes of the model")
        at, counts = 0, list[int]()
        for _ in self.limits:
            value, end = 0, at + 5
            while True:
                require(at < min(end, len(block)), "number of tokens")
                value |= (block[at] & 127) << 7 * (at + 5 - end)
                at += 1
                if block[at - 1] < 128:
                    break
            counts.append(value)
        lanes, counts[0] = 31 * (counts[0] & 1) + 1, counts[0] >> 1
        require(max(counts) <= n and sum(counts) <= n, "number of tokens")
        tail, start = 0, at + 4 * lanes + 2 * (lanes > 1)
        require(len(block) >= start and (len(block) - start) % 2 == 0, "size of a block")
        if lanes > 1:
            tail = struct.unpack("<H", block[at : at + 2])[0]
        states = list(struct.unpack(f"<{lanes}I", block[start - 4 * lanes : start]))
        words = np.frombuffer(block[start:], "<u2").tolist()[::-1]
        rows = [row for row, count in zip(self.rows, counts, strict=True) for _ in range(count)]
        tokens = self.rans._steps(rows, states, words)
        listed = self._listed(tokens, counts, previous)
        require(tail <= len(listed), "codes of the tail")
        own = [self.rans.rows[previous[i]] for i in listed]
        require(all(row.starts for row in own), "no code in an empty row")
        symbols = self.rans._steps(own[: len(own) - tail], states, words)
        require(not words, "end of a block")
        if lanes > 1:
            require(all(65536 <= x < 131072 for x in states), "end of the lanes")
            words, states = [x - 65536 for x in states][:1:-1], [states[0] - 65536 + 65536 * (states[1] - 65536)]
            symbols += self.rans._steps(own[len(own) - tail :], states, words)
        require(not any(words) and states == [65536], "end of a block")
        out = list(previous)
        for place, symbol in zip(listed, symbols, strict=True):
            out[place] = symbol
        require(max(out) < self.symbols, "codes of the model")
        return out

    def _listed(self, tokens: list[int], counts: list[int], previous: Sequence[int]) -> list[int]:
        """The elements that tokens list, ascending."""
        indices = [i for i, code in enumerate(previous) if self.kinds[code] == len(counts)]
        for k, count in enumerate(counts):
            own, at = [i for i, code in enumerate(previous) if self.kinds[code] == k], 0
            require(count == 0 or tokens[count - 1] < self.limits[k], "the last token of a class")
            for token in tokens[:count]:
                at += token
                if token < self.limits[k]:
                    require(at < len(own), "changes within a class")
                    indices.append(own[at])
                    at += 1
            tokens = tokens[count:]
        return sorted(indices)


class Huffman:  # section 11
    def __init__(self, model: bytes) -> None:
        require(len(model) >= 6, "model")
        version, flags, self.contexts, self.symbols = struct.unpack("<BBHH", model[:6])
        require(version == 1 and flags <= 3 and self.contexts <= 256 and 1 <= self.symbols <= 256, "model")
        self.rearrange, bits = bool(flags & 1), Bits(model[6:])
        for _ in range(self.contexts + 1):
            list(bits.ascending(bits.number(), self.symbols))
        bits.finish()

    def decode(self, block: bytes, n: int, previous: Sequence[int] | None) -> list[int]:
        bits, out = Bits(block), [0] * n
        base = self.symbols if previous is None else max(self.contexts, self.symbols)
        groups: dict[int, list[int]] = {}
        for i in range(n):
            groups.setdefault(previous[i] if previous is not None and self.rearrange else 0, []).append(i)
        for _, members in sorted(groups.items()):
            for i, value in zip(members, self._group(bits, len(members), base), strict=True):
                out[i] = value if previous is None else (previous[i] - value) % base
        bits.finish()
        require(max(out, default=0) < self.symbols, "codes below symbols")
        return out

    @staticmethod
    def _group(bits: Bits, n: int, base: int) -> list[int]:
        used = bits.number() + 1
        lengths = [(bits.field(4) if used > 1 else 0, token) for token in bits.ascending(used, base + 288)]
        if used == 1 and lengths[0][1] < base:
            return [lengths[0][1]] * n
        require(min(lengths)[0] > 0 and sum(M >> length for length, _ in lengths) == M, "lengths")
        tokens, code, before = dict[tuple[int, int], int](), 0, 0
        for length, token in sorted(lengths):
            code <<= length - before
            tokens[length, code] = token
            code, before = code + 1, length
        values, fresh = list[int](), False
        while len(values) < n:
            length = code = 0
            while (length, code) not in tokens:
                length, code = length + 1, code << 1 | bits.field(1)
            token = tokens[length, code]
            run = 1 if token < base else (token - base + 1 if token < base + 256 else 1 << (token - base - 247)) - fresh
            fresh = token < base
            require((fresh or bool(values)) and len(values) + run <= n, "a run in its group")
            values += ([token] if fresh else values[-1:]) * run
        return values
