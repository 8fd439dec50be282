"""Questions about one scene: each unambiguous there, with its answer and the objects that are its evidence.

A form is a method of `Asker` that returns `(fields, answer, evidence)` or None where the scene does not hold
such a question; `fields` fills the form's phrases in the vocabulary.
"""

from collections import defaultdict
from itertools import pairwise
from math import hypot

from .scene_vocabulary import COLOURS, CORNERS, CROWDS, DIRECTIONS, EXTREMES, PHRASES, plural, with_article

# form -> how often, among the forms of its type, in a normal and in a hard scene
FORMS = {
    "attribute": {"kind": (6, 3), "text": (2, 2), "extreme": (0, 6)},
    "identity": {"colour": (3, 3), "corner": (1, 2)},
    "reading": {"colour": (4, 4), "only": (1, 1), "extreme": (0, 4)},
    "relation": {"name": (3, 3), "colour": (1, 3), "check": (2, 1)},
    "counting": {"colour": (2, 2), "kind": (4, 2), "both": (1, 3), "sum": (0, 3)},
    "existence": {"both": (4, 4), "kind": (1, 0), "two": (0, 4)},
    "comparison": {"larger": (2, 1), "smaller": (2, 1), "more": (2, 3), "three": (0, 3)},
    "whole": {"ground": (1, 1), "crowd": (1, 1), "colour": (1, 1)},
    "pointing": {"kind": (4, 2), "both": (2, 6), "colour": (1, 1)},
}
TYPO_SHARE = 0.08
MOST_COUNTED = 6


def percent(point: tuple[float, float], size: tuple[int, int]) -> tuple[int, int]:
    """(x, y) in pixels of a canvas `size` = (height, width) -> the two numbers in 0 to 99 that `pointing` asks for."""
    return tuple(min(99, int(100 * at / side)) for at, side in zip(point, reversed(size), strict=True))


class Asker:
    """Asks about `objects` on a canvas `size` = (height, width), within what `split` may use."""

    def __init__(self, dice, objects, size, split, hard, ground, held_out, kinds_at):
        self.dice, self.objects, (self.height, self.width) = dice, objects, size
        self.split, self.hard, self.ground = split, hard, ground
        self.held_out, self.kinds_at = held_out, kinds_at
        self.short = min(size)
        self.by_kind, self.by_colour, self.by_both = defaultdict(list), defaultdict(list), defaultdict(list)
        for thing in objects:
            self.by_kind[thing.kind].append(thing)
            self.by_colour[thing.colour].append(thing)
            self.by_both[thing.colour, thing.kind].append(thing)
        self.unique = [things[0] for kind, things in self.by_kind.items() if len(things) == 1 and kind != "sign"]

    # ---- choosing

    def questions(self, n: int, types) -> list[tuple]:
        """Up to `n` of `(question, answer, type, boxes)`, no two alike, types as even as the scene allows."""
        out, seen = [], set()
        for _ in range(3):
            for type_ in self.dice.shuffled(types):
                if len(out) == n:
                    return out
                asked = self._ask(type_)
                if asked and asked[:1] not in seen:
                    seen.add(asked[:1])
                    out.append(asked)
        return out

    def _ask(self, type_: str) -> tuple | None:
        forms = [form for form, weights in FORMS[type_].items() for _ in range(weights[self.hard])]
        tried = set()
        for form in self.dice.shuffled(forms):
            if form in tried:
                continue
            tried.add(form)
            asked = getattr(self, f"_{type_}_{form}")()
            if asked:
                fields, answer, evidence = asked
                phrase = self._phrase(f"{type_}.{form}", fields, evidence)
                return phrase, answer, type_, tuple(thing.box for thing in evidence)
        return None

    def _phrase(self, form: str, fields: dict, evidence) -> str:
        *known, held_out = PHRASES[form]
        phrase = self.dice.pick(known)
        if self.split == "heldout":  # new in its objects, or else in its words; at times in both
            new_pair = (
                any(self._new(thing) for thing in evidence)
                or (fields.get("colour"), fields.get("kind")) in self.held_out
            )
            if not new_pair or self.dice.chance(0.4):
                phrase = held_out
        for name in ("kind", "other"):
            if name in fields:
                fields[name + "s"] = plural(fields[name])
        if "kind" in fields:
            fields["a_kind"] = with_article(fields["kind"])
        if "colour" in fields:
            fields["a_colour"] = with_article(fields["colour"])
        if "second" in fields:
            fields["a_second"] = with_article(fields["second"])
        words = phrase.format(**fields)
        return self._typo(words, fields.get("text", "")) if self.dice.chance(TYPO_SHARE) else words

    def _typo(self, question: str, keep: str) -> str:
        """One letter lost, doubled or swapped inside a word of four letters or more; a sign's text stays."""
        words = question.split()
        places = [i for i, word in enumerate(words) if word.isalpha() and len(word) > 3 and word != keep]
        if not places:
            return question
        place = self.dice.pick(places)
        word = words[place]
        at = 1 + self.dice.integer(len(word) - 2)
        words[place] = self.dice.pick(
            (
                word[:at] + word[at + 1 :],
                word[:at] + word[at] + word[at:],
                word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            )
        )
        return " ".join(words)

    def _new(self, thing) -> bool:
        return (thing.colour, thing.kind) in self.held_out

    def _pick(self, things):
        """One of them, or None; in the held-out split a new pair if there is one."""
        if self.split == "heldout":
            things = [thing for thing in things if self._new(thing)] or things
        return self.dice.pick(things) if things else None

    def _absent_kind(self) -> str | None:
        """A kind that is not here, drawn as kinds are drawn for scenes, so that its name gives nothing away."""
        kinds = [kind for kind in self.kinds_at(self.dice.log_uniform(12, 80)) if kind not in self.by_kind]
        return self.dice.pick(kinds) if kinds else None

    def _margin(self, things, extreme: str):
        """The thing that is clearly the `extreme` of them, or None."""
        if len(things) < 2:
            return None
        if extreme in ("largest", "smallest"):
            order = sorted(things, key=_length, reverse=extreme == "largest")
            first, second = order[0], order[1]
            return (
                first if clearly_larger(*((first, second) if extreme == "largest" else (second, first)), 1.3) else None
            )
        axis, sign = {"leftmost": (0, 1), "rightmost": (0, -1), "highest": (1, 1), "lowest": (1, -1)}[extreme]
        order = sorted(things, key=lambda thing: sign * thing.centre[axis])
        return order[0] if sign * (order[1].centre[axis] - order[0].centre[axis]) > 0.06 * self.short else None

    def _extreme_of(self, things):
        for extreme in self.dice.shuffled(EXTREMES):
            found = self._margin(things, extreme)
            if found:
                return extreme, found
        return None

    # ---- attribute, identity, reading, pointing: one object

    def _attribute_kind(self):
        thing = self._pick(self.unique)
        return thing and ({"kind": thing.kind}, thing.colour, [thing])

    def _attribute_text(self):
        signs = self.by_kind.get("sign", [])
        signs = [sign for sign in signs if sum(s.text == sign.text for s in signs) == 1]
        sign = self._pick(signs)
        return sign and ({"text": sign.text}, sign.colour, [sign])

    def _attribute_extreme(self):
        groups = [kind for kind, things in self.by_kind.items() if len(things) > 1 and kind != "sign"]
        kind = groups and self.dice.pick(groups)
        found = kind and self._extreme_of(self.by_kind[kind])
        return found and ({"extreme": found[0], "kind": kind}, found[1].colour, self.by_kind[kind]) or None

    def _only_of_colour(self):
        return self._pick([things[0] for things in self.by_colour.values() if len(things) == 1])

    def _identity_colour(self):
        thing = self._only_of_colour()
        return thing and ({"colour": thing.colour}, thing.kind, [thing])

    def _identity_corner(self):
        for corner in self.dice.shuffled(CORNERS):
            cy, cx = (0 if "top" in corner else self.height), (0 if "left" in corner else self.width)
            distances = sorted(((hypot(t.centre[0] - cx, t.centre[1] - cy), n) for n, t in enumerate(self.objects)))
            if (
                distances
                and distances[0][0] < 0.35 * self.short
                and (len(distances) < 2 or distances[1][0] > 1.5 * distances[0][0] + 0.04 * self.short)
            ):
                thing = self.objects[distances[0][1]]
                return {"corner": corner}, thing.kind, [thing]
        return None

    def _reading_colour(self):
        signs = self.by_kind.get("sign", [])
        sign = self._pick([sign for sign in signs if len(self.by_both[sign.colour, "sign"]) == 1])
        return sign and ({"colour": sign.colour}, sign.text, [sign])

    def _reading_only(self):
        signs = self.by_kind.get("sign", [])
        return ({}, signs[0].text, signs) if len(signs) == 1 else None

    def _reading_extreme(self):
        signs = self.by_kind.get("sign", [])
        found = self._extreme_of(signs)
        return found and ({"extreme": found[0]}, found[1].text, signs)

    def _point(self, thing) -> str:
        return "{} {}".format(*percent(thing.centre, (self.height, self.width)))

    def _pointing_kind(self):
        thing = self._pick(self.unique)
        return thing and ({"kind": thing.kind}, self._point(thing), [thing])

    def _pointing_both(self):
        alone = [things[0] for things in self.by_both.values() if len(things) == 1]
        alike = [thing for thing in alone if len(self.by_kind[thing.kind]) > 1]  # only the colour tells them apart
        thing = self._pick(alike if alike and self.dice.chance(0.7) else alone)
        return thing and ({"colour": thing.colour, "kind": thing.kind}, self._point(thing), [thing])

    def _pointing_colour(self):
        thing = self._only_of_colour()
        return thing and ({"colour": thing.colour}, self._point(thing), [thing])

    # ---- relation

    def _neighbour(self):
        """(direction, reference, the one thing that is clearly next to it in that direction)."""
        for reference in self.dice.shuffled(self.unique)[:6]:
            for direction in self.dice.shuffled(DIRECTIONS):
                other = next_to(reference, direction, self.objects, self.short)
                if other:
                    return direction, reference, other
        return None

    def _relation_name(self):
        found = self._neighbour()
        return found and ({"direction": found[0], "kind": found[1].kind}, found[2].kind, [found[1], found[2]])

    def _relation_colour(self):
        found = self._neighbour()
        return found and ({"direction": found[0], "kind": found[1].kind}, found[2].colour, [found[1], found[2]])

    def _relation_check(self):
        wanted = self.dice.chance(0.5)
        for _ in range(8):
            if len(self.unique) < 2:
                return None
            first, second = self.dice.shuffled(self.unique)[:2]
            direction = self.dice.pick(DIRECTIONS)
            truth = clearly(first, direction, second, 0.03 * self.short)
            if truth is wanted:
                return {"kind": first.kind, "direction": direction, "other": second.kind}, _yes(truth), [first, second]
        return None

    # ---- counting

    def _count(self, groups: dict):
        """One of `groups` {fields as items: things}, so that every number is asked for about as often."""
        by_number = defaultdict(list)
        for key, things in groups.items():
            if len(things) <= MOST_COUNTED:
                by_number[len(things)].append((key, things))
        numbers = [number for number in sorted(by_number) for _ in range(1 if number < 2 else 3)]
        if not numbers:
            return None
        number = self.dice.pick(numbers)
        key, things = self.dice.pick(by_number[number])
        return dict(key), str(number), things

    def _counting_colour(self):
        return self._count({(("colour", colour),): self.by_colour.get(colour, []) for colour in COLOURS})

    def _counting_kind(self):
        groups = {(("kind", kind),): things for kind, things in self.by_kind.items()}
        absent = self._absent_kind()
        if absent:
            groups[("kind", absent),] = []
        return self._count(groups)

    def _counting_both(self):
        pairs = {(("colour", c), ("kind", k)): things for (c, k), things in self.by_both.items()}
        for kind, things in self.by_kind.items():  # a colour that these do not have
            if len(things) > 1:
                colour = self.dice.pick(COLOURS)
                if (colour, kind) not in self.by_both and self._may_ask(colour, kind):
                    pairs[("colour", colour), ("kind", kind)] = []
        return self._count(pairs)

    def _counting_sum(self):
        kinds = self.dice.shuffled(self.by_kind)[:8]
        pairs = {
            (("kind", a), ("other", b)): self.by_kind[a] + self.by_kind[b]
            for a, b in zip(kinds[::2], kinds[1::2], strict=False)
        }
        return self._count(pairs)

    # ---- existence

    def _may_ask(self, colour: str, kind: str) -> bool:
        return self.split == "heldout" or (colour, kind) not in self.held_out

    def _lookalike(self) -> tuple[str, str] | None:
        """A pair that is not here although its colour and its kind both are."""
        if not self.objects:
            return None
        kinds, colours = list(self.by_kind), list(self.by_colour)
        if self.split == "heldout":
            new = [(c, k) for k in kinds for c in colours if (c, k) in self.held_out and (c, k) not in self.by_both]
            if new:
                return self.dice.pick(new)
        for _ in range(8):
            pair = self.dice.pick(colours), self.dice.pick(kinds)
            if pair not in self.by_both and self._may_ask(*pair):
                return pair
        return None

    def _missing_pair(self) -> tuple[str, str] | None:
        if self.dice.chance(0.75):
            return self._lookalike()
        kind, colour = self._absent_kind(), self.dice.pick(COLOURS)
        return (colour, kind) if kind and self._may_ask(colour, kind) else None

    def _existence_both(self):
        if self.dice.chance(0.5):
            thing = self._pick(self.objects)
            return thing and (
                {"colour": thing.colour, "kind": thing.kind},
                "yes",
                self.by_both[thing.colour, thing.kind],
            )
        pair = self._missing_pair()
        # What shows that there is none: the things of that kind, all of other colours.
        return pair and ({"colour": pair[0], "kind": pair[1]}, "no", self.by_kind.get(pair[1], []))

    def _existence_kind(self):
        if self.dice.chance(0.5):
            thing = self._pick([thing for thing in self.objects if thing.kind != "sign"])
            return thing and ({"kind": thing.kind}, "yes", self.by_kind[thing.kind])
        kind = self._absent_kind()
        return kind and ({"kind": kind}, "no", [])

    def _existence_two(self):
        """Both there, or one there and the other only nearly."""
        yes = self.dice.chance(0.5)
        for _ in range(8 if len(self.by_kind) > 1 else 0):
            first = self._pick(self.objects)
            second = self.dice.pick(list(self.by_both)) if yes else self._lookalike()
            if second and second[1] != first.kind:
                evidence = self.by_both[first.colour, first.kind] + (
                    self.by_both[second] if yes else self.by_kind[second[1]]
                )
                one, two = self.dice.shuffled([(first.colour, first.kind), second])
                return {"colour": one[0], "kind": one[1], "second": two[0], "other": two[1]}, _yes(yes), evidence
        return None

    # ---- comparison

    def _pair_by_size(self):
        """(larger, smaller) among things named by their kind, clearly so."""
        things = self.dice.shuffled(self.unique)
        for a, b in pairwise(things):
            for large, small in ((a, b), (b, a)):
                if clearly_larger(large, small, 1.4):
                    return large, small
        return None

    def _compared(self, found, answer):
        first, second = self.dice.shuffled(found)
        return {"kind": first.kind, "other": second.kind}, answer.kind, [first, second]

    def _comparison_larger(self):
        found = self._pair_by_size()
        return found and self._compared(found, found[0])

    def _comparison_smaller(self):
        found = self._pair_by_size()
        return found and self._compared(found, found[1])

    def _comparison_three(self):
        things = self.dice.shuffled(self.unique)
        for trio in zip(things, things[1:], things[2:], strict=False):
            largest = self._margin(trio, "largest")
            if largest:
                return (
                    dict(zip(("kind", "other", "third"), (thing.kind for thing in trio), strict=True)),
                    largest.kind,
                    list(trio),
                )
        return None

    def _comparison_more(self):
        kinds = self.dice.shuffled(self.by_kind)
        kinds.sort(key=lambda kind: -len(self.by_kind[kind]))  # stable: a group first, then at random
        if len(kinds) < 2 or len(self.by_kind[kinds[0]]) == 1:
            return None
        more = self.by_kind[kinds[0]]
        fewer = [kind for kind in kinds[1:] if len(self.by_kind[kind]) < len(more)]
        if not fewer or len(more) > MOST_COUNTED:
            return None
        less = self.by_kind[self.dice.pick(fewer[:3])]
        yes = self.dice.chance(0.5)
        first, second = (more, less) if yes else (less, more)
        return {"kind": first[0].kind, "other": second[0].kind}, _yes(yes), first + second

    # ---- the whole scene: no evidence boxes

    def _whole_ground(self):
        return {}, self.ground, []

    def _whole_crowd(self):
        n = len(self.objects)
        crowd = 0 if n <= 7 else 1 if 10 <= n <= 14 else 2 if n >= 18 else None  # gaps keep it clear
        return None if crowd is None or self.short < 200 else ({}, CROWDS[crowd], [])

    def _whole_colour(self):
        counts = sorted(((len(things), colour) for colour, things in self.by_colour.items()), reverse=True)
        if not counts or counts[0][0] < 3 or (len(counts) > 1 and counts[0][0] < counts[1][0] + 2):
            return None
        return {}, counts[0][1], []


# ---------------------------------------------------------------- geometry


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _length(thing) -> int:
    return max(thing.box[2] - thing.box[0], thing.box[3] - thing.box[1])


def _area(thing) -> int:
    return (thing.box[2] - thing.box[0]) * (thing.box[3] - thing.box[1])


def clearly_larger(a, b, ratio: float) -> bool:
    """Longer and larger by `ratio`, so that every reading of "larger" agrees."""
    return _length(a) > ratio * _length(b) and _area(a) > ratio * _area(b)


def _turned(box, direction: str) -> tuple[float, float, float, float]:
    """The box in axes where `direction` points to lower first coordinates: (along0, across0, along1, across1)."""
    x0, y0, x1, y1 = box
    return {
        "left of": (x0, y0, x1, y1),
        "right of": (-x1, y0, -x0, y1),
        "above": (y0, x0, y1, x1),
        "below": (-y1, x0, -y0, x1),
    }[direction]


def clearly(a, direction: str, b, margin: float) -> bool | None:
    """Whether `a` lies in this direction of `b`: True or False where their boxes are apart that way, else None."""
    first, second = _turned(a.box, direction), _turned(b.box, direction)
    if first[2] + margin < second[0]:
        return True
    return False if second[2] + margin < first[0] else None


def next_to(reference, direction: str, objects, short: int):
    """The thing in that direction of the reference: level with it, near, and far nearer than any rival; or None."""
    r0, s0, r1, s1 = _turned(reference.box, direction)
    near = []
    for thing in objects:
        if thing is reference:
            continue
        a0, b0, a1, b1 = _turned(thing.box, direction)
        along = (r0 + r1) / 2 - (a0 + a1) / 2
        across = abs((b0 + b1) / 2 - (s0 + s1) / 2)
        gap = hypot(max(r0 - a1, 0), max(b0 - s1, s0 - b1, 0))
        if along > 0 and across < 1.5 * along or (a0 < r0 and gap == 0):
            level = min(b1, s1) - max(b0, s0) >= 0.5 * min(b1 - b0, s1 - s0) and a1 <= r0 and across < 0.6 * along
            near.append((gap, level, thing))
    near.sort(key=lambda entry: entry[0])
    if not near or not near[0][1] or near[0][0] > 0.25 * short:
        return None
    rival = near[1][0] if len(near) > 1 else float("inf")
    return near[0][2] if rival > 1.5 * near[0][0] + 0.03 * short else None
