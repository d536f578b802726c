"""The words the generated problems are made of: few enough that a model of a million parameters
knows each of them.
"""

from __future__ import annotations

#: Name and the pronoun that stands for it.
PEOPLE: tuple[tuple[str, str], ...] = tuple(
    (name, pronoun)
    for pronoun, names in {
        "She": "Mia Anna Lena Nora Sara Ruth Emma Zoe Clara Ida",
        "He": "Tom Ben Sam Max Leo Paul Ali Jack Omar Hugo",
    }.items()
    for name in names.split()
)

#: Countable things, in the plural; things there is one of.
OBJECTS, THINGS, PLACES, ADJECTIVES, JOBS = (
    tuple(words.split())
    for words in (
        "apples books coins cards pens eggs shells stamps balls cups boxes stones plums roses tickets candles",
        "lamp chair boat clock drum coat kite map piano tent bike mirror",
        "Oslo Rome Paris Lima Cairo Delhi Tokyo Quito Bern Dublin Riga Seoul",
        "red tall small green heavy new blue round dark quiet",
        "baker nurse pilot teacher farmer doctor singer painter",
    )
)

#: Name of a kind of thing (plural) and some of its members, in the order a list goes on in.
CATEGORIES: dict[str, tuple[str, ...]] = {
    name: tuple(members.split())
    for name, members in {
        "colors": "red blue green white black pink gray brown",
        "fruits": "apple pear plum lemon mango cherry grape fig",
        "animals": "dog cat horse goat duck wolf bear fox",
        "tools": "hammer saw drill axe rake file spade brush",
        "rooms": "kitchen hall attic cellar garage office bath study",
    }.items()
}
