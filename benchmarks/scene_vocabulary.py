"""The words of the scenes: what can stand in one, its colours, its signs, and how one asks about it.

Only data. `PHRASES[form]` lists ways to ask one form of question; the last of each is held out: it
appears in no split but `heldout`.
"""

# name: (code point in DejaVu Sans, how it is tinted, smallest side in pixels at which it can be told apart)
# "solid": the glyph's ink takes the colour. "filled": its silhouette takes the colour, its lines stay dark.
PICTOGRAMS = {
    "aeroplane": (0x2708, "solid", 18), "anchor": (0x2693, "solid", 18), "ankh": (0x2625, "solid", 18),
    "arrow": (0x27A1, "solid", 16), "atom": (0x269B, "filled", 28), "bolt": (0x26A1, "solid", 20),
    "castle": (0x265C, "solid", 18), "cat": (0x1F431, "filled", 30), "cloud": (0x2601, "solid", 16),
    "clover": (0x2618, "solid", 18), "cow": (0x1F42E, "filled", 30), "cross": (0x2716, "solid", 14),
    "crown": (0x265B, "solid", 20), "cup": (0x2615, "filled", 24), "dice": (0x2684, "filled", 18),
    "envelope": (0x2709, "filled", 20), "flag": (0x2691, "solid", 18), "flower": (0x273F, "solid", 20),
    "gear": (0x2699, "solid", 22), "hand": (0x270C, "filled", 26), "heart": (0x2665, "solid", 14),
    "horse": (0x265E, "solid", 22), "house": (0x2302, "filled", 16), "key": (0x26B7, "solid", 24),
    "keyboard": (0x2328, "filled", 28), "monkey": (0x1F435, "filled", 30), "moon": (0x263E, "filled", 18),
    "mouse": (0x1F42D, "filled", 30), "note": (0x266B, "solid", 18), "pawn": (0x265F, "solid", 18),
    "pencil": (0x270F, "filled", 24), "plus": (0x271A, "solid", 14), "scales": (0x2696, "filled", 28),
    "scissors": (0x2702, "solid", 22), "skull": (0x2620, "filled", 28), "smiley": (0x263A, "filled", 22),
    "snowflake": (0x2744, "solid", 24), "snowman": (0x2603, "filled", 28), "spade": (0x2660, "solid", 18),
    "star": (0x2605, "solid", 14), "sun": (0x2600, "solid", 20), "swords": (0x2694, "solid", 24),
    "telephone": (0x260E, "solid", 22), "tick": (0x2714, "solid", 16), "trident": (0x2646, "solid", 20),
    "umbrella": (0x2602, "solid", 18), "vase": (0x26B1, "filled", 20), "wheel": (0x2638, "filled", 24),
    "wheelchair": (0x267F, "solid", 22),
}
SHAPES = {"circle": 12, "square": 12, "triangle": 12, "diamond": 12, "ring": 14, "pentagon": 22, "hexagon": 22}
KINDS = (*SHAPES, *PICTOGRAMS, "sign")
SMALLEST = {**SHAPES, **{name: smallest for name, (_, _, smallest) in PICTOGRAMS.items()}, "sign": 9}

PALETTE = {
    "red": (222, 30, 38), "orange": (250, 138, 18), "yellow": (250, 224, 40), "green": (36, 150, 52),
    "cyan": (60, 214, 226), "blue": (36, 76, 226), "purple": (128, 36, 176), "pink": (252, 138, 196),
    "white": (248, 248, 246), "black": (18, 18, 22),
}
COLOURS = tuple(PALETTE)
# Strays (glyphs outside the vocabulary) wear colours that no question names.
STRAY_COLOURS = ((128, 128, 128), (170, 160, 140), (112, 86, 62), (96, 108, 84), (88, 100, 120), (146, 120, 96))
STRAYS = "♃♄♅♈♉♊♋♌♍♎♏♐♑♒♓☊☋⌘⎇☡☧☫☬♇♭♮♯⚕⚚⚜❡❦❧ξφϪϞЖЮѢҨԖ"

PLURALS = {"mouse": "mice", "snowman": "snowmen", "cross": "crosses", "plus": "pluses", "scissors": "scissors",
           "scales": "scales", "swords": "swords", "dice": "dice"}

WORDS = tuple("""
able acid apple arch army baby back bake ball bank barn bath beach bean bell belt bend bird boat bone book boot
bowl bread brick bus cafe cake camp card cave chair chess city clay clock coal coat coin cold cook corn dawn desk
diner dock dog door down draw dream drum dust east echo edge exit face farm fast film fire fish five flat fog food
fork fort four free frog fuel game gate gift glass goat gold good hall hat help hill home hope horn hotel ice
inn iron jazz jump king kite lake lamp lane leaf left lemon lift lime lion lock lunch mail map market milk mill mint
music nest news night north oak ocean open oven park path pear piano pine pizza plum pond pool port post prize pull
push quiet radio rain rice river road rock roof room rose salt sand shop ski slow snow soap soup south stop sugar
swim table taxi tea tent toast tower town toy train tree up van view wait walk wall water way west wind wine wolf wood
yard yes zero zoo""".split())
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"  # no I and no O: alone they are digits as well

# Grounds: name -> the answer to "what is the background?".
CALM_GROUNDS = ("plain", "gradient", "stripes", "checks", "marble")
DENSE_GROUNDS = ("bricks", "grass", "gravel", "coins", "page", "leaves", "scribble", "photo")
CROWDS = ("few", "some", "many")
DIRECTIONS = ("left of", "right of", "above", "below")
CORNERS = ("top left", "top right", "bottom left", "bottom right")
EXTREMES = ("leftmost", "rightmost", "highest", "lowest", "largest", "smallest")

QUESTION_TYPES = ("attribute", "identity", "reading", "relation", "counting", "existence", "comparison", "whole",
                  "pointing")
# The form's first word, up to the dot, is its question type.
PHRASES = {
    "attribute.kind": ("what colour is the {kind}?", "what is the colour of the {kind}?",
                       "which colour has the {kind}?",
                       "colour of the {kind}?", "tell me the {kind}'s colour"),
    "attribute.text": ("what colour is the sign that says {text}?", "what is the colour of the {text} sign?",
                       "which colour has the sign that says {text}?", "the sign reading {text} is what colour?"),
    "attribute.extreme": ("what colour is the {extreme} {kind}?", "what is the colour of the {extreme} {kind}?",
                          "colour of the {extreme} {kind}?", "tell me the {extreme} {kind}'s colour"),
    "identity.colour": ("what is the {colour} thing?", "what {colour} thing is there?", "name the {colour} thing",
                        "which thing is {colour}?", "identify the object that is {colour}"),
    "identity.corner": ("what is nearest to the {corner} corner?", "which thing is closest to the {corner} corner?",
                        "what is in the {corner} corner?", "name the thing by the {corner} corner",
                        "identify the object towards the {corner}"),
    "reading.colour": ("what does the {colour} sign say?", "read the {colour} sign",
                       "what is written on the {colour} sign?",
                       "text on the {colour} sign?", "tell me the words of the {colour} sign"),
    "reading.only": ("what does the sign say?", "read the sign", "what is written on the sign?", "text on the sign?",
                     "tell me the words of the sign"),
    "reading.extreme": ("what does the {extreme} sign say?", "read the {extreme} sign",
                        "what is written on the {extreme} sign?", "tell me the words of the {extreme} sign"),
    "relation.name": ("what is {direction} the {kind}?", "which thing is {direction} the {kind}?",
                      "what stands {direction} the {kind}?", "name the thing {direction} the {kind}",
                      "identify the object {direction} the {kind}"),
    "relation.colour": ("what colour is the thing {direction} the {kind}?",
                        "what is the colour of the thing {direction} the {kind}?",
                        "colour of the thing {direction} the {kind}?", "tell me the colour {direction} the {kind}"),
    "relation.check": ("is the {kind} {direction} the {other}?", "does the {kind} stand {direction} the {other}?",
                       "would you find the {kind} {direction} the {other}?"),
    "counting.colour": ("how many {colour} things are there?", "count the {colour} things",
                        "number of {colour} things?",
                        "how many things are {colour}?", "tell me how many objects are {colour}"),
    "counting.kind": ("how many {kinds} are there?", "count the {kinds}", "number of {kinds}?",
                      "how many {kinds} do you see?", "tell me how many {kinds} can be found"),
    "counting.both": ("how many {colour} {kinds} are there?", "count the {colour} {kinds}",
                      "number of {colour} {kinds}?",
                      "how many {colour} {kinds} do you see?", "tell me how many {colour} {kinds} can be found"),
    "counting.sum": ("how many {kinds} and {others} are there together?", "count the {kinds} and the {others}",
                     "tell me how many {kinds} and {others} can be found"),
    "existence.both": ("is there {a_colour} {kind}?", "do you see {a_colour} {kind}?", "is any {kind} {colour}?",
                       "can you see {a_colour} {kind}?", "does the picture contain {a_colour} {kind}?"),
    "existence.kind": ("is there {a_kind}?", "do you see {a_kind}?", "is there any {kind}?", "can you see {a_kind}?",
                       "does the picture contain {a_kind}?"),
    "existence.two": ("is there {a_colour} {kind} and {a_second} {other}?",
                      "do you see both {a_colour} {kind} and {a_second} {other}?",
                      "does the picture contain {a_colour} {kind} and {a_second} {other}?"),
    "comparison.larger": ("which is larger, the {kind} or the {other}?", "what is bigger, the {kind} or the {other}?",
                          "larger: the {kind} or the {other}?", "of the {kind} and the {other}, which is larger?"),
    "comparison.smaller": ("which is smaller, the {kind} or the {other}?", "what is tinier, the {kind} or the {other}?",
                           "smaller: the {kind} or the {other}?", "of the {kind} and the {other}, which is smaller?"),
    "comparison.three": ("which is largest, the {kind}, the {other} or the {third}?",
                         "what is biggest, the {kind}, the {other} or the {third}?",
                         "of the {kind}, the {other} and the {third}, which is largest?"),
    "comparison.more": ("are there more {kinds} than {others}?", "do you see more {kinds} than {others}?",
                        "more {kinds} than {others}?", "do the {kinds} outnumber the {others}?"),
    "whole.ground": ("what is the background?", "what is behind the things?", "what does the background show?",
                     "which background is it?", "describe the backdrop in a word"),
    "whole.crowd": ("how crowded is it: few, some or many?", "are there few, some or many things?",
                    "few, some or many things?", "how full is the picture: few, some or many?"),
    "whole.colour": ("which colour is most common?", "what colour are most things?",
                     "which colour do most things have?",
                     "what is the most frequent colour?", "name the prevailing colour"),
    "pointing.kind": ("point to the {kind}", "where is the {kind}?", "point at the {kind}",
                      "give the place of the {kind}",
                      "locate the {kind}"),
    "pointing.both": ("point to the {colour} {kind}", "where is the {colour} {kind}?", "point at the {colour} {kind}",
                      "give the place of the {colour} {kind}", "locate the {colour} {kind}"),
    "pointing.colour": ("point to the {colour} thing", "where is the {colour} thing?", "point at the {colour} thing",
                        "give the place of the {colour} thing", "locate the object that is {colour}"),
}


def plural(kind: str) -> str:
    return PLURALS.get(kind, kind + "s")


def with_article(phrase: str) -> str:
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase
