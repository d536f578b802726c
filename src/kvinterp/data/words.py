"""The words the generated problems are made of: few enough that a model of a million parameters knows each of them."""

from __future__ import annotations

#: Name and the pronoun that stands for it.
PEOPLE: tuple[tuple[str, str], ...] = (
    ("Mia", "She"),
    ("Anna", "She"),
    ("Lena", "She"),
    ("Nora", "She"),
    ("Sara", "She"),
    ("Ruth", "She"),
    ("Emma", "She"),
    ("Zoe", "She"),
    ("Clara", "She"),
    ("Ida", "She"),
    ("Tom", "He"),
    ("Ben", "He"),
    ("Sam", "He"),
    ("Max", "He"),
    ("Leo", "He"),
    ("Paul", "He"),
    ("Ali", "He"),
    ("Jack", "He"),
    ("Omar", "He"),
    ("Hugo", "He"),
)

#: Countable things, in the plural.
OBJECTS: tuple[str, ...] = (
    "apples",
    "books",
    "coins",
    "cards",
    "pens",
    "eggs",
    "shells",
    "stamps",
    "balls",
    "cups",
    "boxes",
    "stones",
    "plums",
    "roses",
    "tickets",
    "candles",
)

#: Things there is one of.
THINGS: tuple[str, ...] = (
    "lamp",
    "chair",
    "boat",
    "clock",
    "drum",
    "coat",
    "kite",
    "map",
    "piano",
    "tent",
    "bike",
    "mirror",
)

PLACES: tuple[str, ...] = (
    "Oslo",
    "Rome",
    "Paris",
    "Lima",
    "Cairo",
    "Delhi",
    "Tokyo",
    "Quito",
    "Bern",
    "Dublin",
    "Riga",
    "Seoul",
)

ADJECTIVES: tuple[str, ...] = ("red", "tall", "small", "green", "heavy", "new", "blue", "round", "dark", "quiet")

JOBS: tuple[str, ...] = ("baker", "nurse", "pilot", "teacher", "farmer", "doctor", "singer", "painter")

#: Name of a kind of thing (plural) and some of its members, in the order a list goes on in.
CATEGORIES: dict[str, tuple[str, ...]] = {
    "colors": ("red", "blue", "green", "white", "black", "pink", "gray", "brown"),
    "fruits": ("apple", "pear", "plum", "lemon", "mango", "cherry", "grape", "fig"),
    "animals": ("dog", "cat", "horse", "goat", "duck", "wolf", "bear", "fox"),
    "tools": ("hammer", "saw", "drill", "axe", "rake", "file", "spade", "brush"),
    "rooms": ("kitchen", "hall", "attic", "cellar", "garage", "office", "bath", "study"),
}
