r"""Is an answer equal to the reference?  math-verify decides; this file decides what it is given.

    "\dfrac{7}{9}"  ->  $\dfrac{7}{9}$      bare LaTeX and plain expressions get delimiters, so they are read as a whole
    "\text{(C)}", "Sunday", "12:45"         words and times are compared as text
    "5 cm", "\$5", "50\%", "1011_2"         number and unit apart: two units that are known must agree, one is ignored

math-verify alone reads LaTeX only between delimiters, and takes from all else the first number that it finds: `2x+3`
would equal `2x+1`.  Nothing of torch is imported: scoring processes start quickly.
"""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

_UNICODE = str.maketrans(
    {
        "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u22c5": r"\cdot ", "\u00f7": "/",
        "\u2044": "/", "\u03c0": r"\pi ", "\u221a": r"\sqrt ", "\u221e": r"\infty ", "\u2264": r"\le ",
        "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm ", "\u222a": r"\cup ", "\u2229": r"\cap ",
        "\u2208": r"\in ", "\u00b0": r"^\circ ", "\u00b2": "^2", "\u00b3": "^3", "\u00a0": " ", "\u202f": " ",
        "\u2009": " ",
    }
)  # fmt: skip
_PART = r"((?:[^()]|\([^()]*\))*)"  # what a pair of brackets holds, with one more pair in it
_FUNCTIONS = (
    "sqrt|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp|pi|infty|theta|alpha|beta|cup|cap"
)
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|operatorname)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\(?:left|right|displaystyle|bigl|bigr|Bigl|Bigr)(?![A-Za-z])", ""),
        (r",?\s+(?:and|or)\s+", ", "),
        (r"(?<=\d)\\[,!;:]\s*(?=\d{3}(?!\d))", ""),  # 12\,345
        (r"(?<=\d)(?:\{,\}|,\\!\s*|\\!,\s*)(?=\d{3})", ","),  # 12{,}345 and 12,\!345
        (r"(?<!\\)\\(?:[,;:! ]|q?quad)|~", " "),
        (r"\\(?:varnothing|emptyset)", r"\\emptyset "),
        (r"\\degree|\^\s*\{\s*\\circ\s*\}", r"^\\circ "),
        (r"(?<![\\A-Za-z])infinity|(?<![\\A-Za-z])inf(?![A-Za-z])", r"\\infty "),
        (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
        (r"\*\*", "^"),
        (rf"\\sqrt\s*\({_PART}\)", r"\\sqrt{\1}"),
        (rf"\^\s*\({_PART}\)", r"^{\1}"),
        (r"\^\s*(-\d+|\d\d+)", r"^{\1}"),
        (r"(\d)\s*(?:\\times|\\cdot|\*|[xX])\s*10\s*\^\s*\{?\s*([+-]?\d+)\s*\}?", r"\1e\2"),
        (r"\s+", " "),
    )
]
_MIXED = re.compile(r"(-?\d+) (\d+) ?/ ?(\d+)")
_GROUPED = re.compile(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d,])")
_COMMAS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([+-]?\d{1,3})(?!\w)")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_CLOCK = re.compile(
    r"0?(\d{1,2}(?::[0-5]\d){1,2})\s*(?:([ap])\.?\s?m\.?)?|(\d+(?:\.\d+)?(?:\s?:\s?\d+(?:\.\d+)?)+)", re.I
)
_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[A-Za-z]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{4,}|(?<![^\s(])[A-Za-z]{3}(?![^\s.,;:!?)])")
_MATHS = re.compile(r"[\d\\+*/^=<>|_]")
_PERCENT = re.compile(r"\s*(?:\\?%|\bper ?cent(?:age)?(?: points?)?|\bpct)\s*$", re.I)
_MONEY = re.compile(r"^([-+]?)\s*(\\?\$|\u20ac|\u00a3)\s*(?=[\d.])")
_BASE = re.compile(r"^([0-9A-Fa-f]+)_\{?(\d+)\}?$")
_UNIT = re.compile(r"^(.*[\d})\].!]|.*\\pi)( ?)(\^ ?\\circ ?[CFK]?|[A-Za-z][A-Za-z/. ]*?)(?: ?\^ ?\{?([23])\}?)?\.?$")
_ANCHOR = re.compile(r"(?:\banswer\b[^\n:=]{0,40}?(?:\bis\b|:|=)|\b(?:is|are|equals?|be)\b|[:=])\s*:?\s*", re.I)
_LAST_ANSWER = re.compile(r"\banswer\b[^\n:=]{0,40}?(?:\bis\b|:|=)\s*:?\s*([^\n]+)", re.I)
_DELIMITED = re.compile(r"(?<!\\)\$[^$]+\$|\\\((?:(?!\\\().)+?\\\)|\\\[(?:(?!\\\[).)+?\\\]")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_PLAIN_WORD = re.compile(r"[\"'(]*[A-Za-z][A-Za-z'-]*[\"'),.;:!?]*")

_UNITS = {
    name: words.split()[0]
    for words in (
        "m meter meters metre metres", "cm centimeter centimeters centimetre centimetres",
        "mm millimeter millimeters millimetre millimetres", "km kilometer kilometers kilometre kilometres",
        "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles", "kg kilogram kilograms", "g gram grams",
        "mg milligram milligrams", "lb lbs pound pounds", "oz ounce ounces", "l liter liters litre litres",
        "ml milliliter milliliters millilitre millilitres", "gal gallon gallons", "s sec secs second seconds",
        "min mins minute minutes", "h hr hrs hour hours", "day days", "week weeks", "month months",
        "year years yr yrs", "degree degrees deg", "rad radian radians", "dollar dollars usd", "cent cents",
        "euro euros", "mph", "kph kmh kmph", "unit units",
    )
    for name in words.split()
}  # fmt: skip
_CURRENCY = {"$": "dollar", "\\$": "dollar", "\u20ac": "euro", "\u00a3": "pound sterling"}
_LONGEST = 2000  # characters of an answer in mathematics; of a longer text only the end is read
_MOST_EXPONENT = 300  # of ten: beyond it a plain decimal would be longer than any answer


class Reading(NamedTuple):
    """One answer, as it is compared."""

    text: str  # lower case, without LaTeX and punctuation: compared where one side is not mathematics
    maths: str  # LaTeX without delimiters, number apart from its unit; empty: words
    unit: str  # "": none, or one that is not known
    percent: bool


def equal(reference: str, answer: str) -> bool | None:
    """Does the answer say what the reference says?  None: it holds no mathematics, and the reference does."""
    wanted, readings = read(final(reference)), [read(one) for one in _candidates(final(answer))]
    if any(_same(wanted, found) for found in readings):
        return True
    return None if wanted.maths and not any(found.maths for found in readings) else False


@lru_cache(maxsize=256)  # a group of responses has one reference
def readable(reference: str) -> bool:
    """Words, or mathematics that math-verify reads and finds equal to itself?"""
    found = read(final(reference))
    expressions = [one for one in _parsed(found.maths) if not isinstance(one, str)] if found.maths else []
    return _verified(expressions, expressions, decimals=6) if found.maths else bool(found.text)


def final(text: str) -> str:
    r"""What a worked solution ends with: the content of its last \boxed, or what follows GSM8K's ####."""
    from latex2sympy2_extended.math_normalization import extract_boxed_content

    if r"\boxed" in text or r"\fbox" in text:
        return str(extract_boxed_content(text, mode="last"))
    return text.rpartition("####")[2]


def _candidates(text: str) -> list[str]:
    """What the text may mean, the text itself first; of a sentence, what it says at its end."""
    found, sentence = [text], text.strip()
    if not read(text).maths:
        said = _LAST_ANSWER.findall(sentence)
        last = said[-1] if said else sentence.rpartition("\n")[2]
        delimited = _DELIMITED.findall(last)
        tail = _ANCHOR.split(last)[-1]
        found += [delimited[-1]] if delimited else [tail, *_only_number(tail)]
    return found


def _only_number(sentence: str) -> list[str]:
    """The number of a sentence that has one number among words."""
    tokens = [(token, token.strip("*$\"'().,;:!?")) for token in sentence.split()]
    numbers = [bare for _, bare in tokens if _NUMBER.fullmatch(bare)]
    words = [token for token, bare in tokens if not _NUMBER.fullmatch(bare)]
    return numbers if len(numbers) == 1 and all(_PLAIN_WORD.fullmatch(word) for word in words) else []


@lru_cache(maxsize=256)
def read(text: str) -> Reading:
    """Words or mathematics, unit and percent sign apart."""
    maths = _rewritten(text) if len(text) <= _LONGEST else ""
    words = " ".join((maths or text).split()).strip(" .,;!?\"'").casefold()
    if clock := _CLOCK.fullmatch(words):
        hours, half, ratio = clock.groups()
        return Reading(ratio.replace(" ", "") if ratio else f"{hours}{half or ''}", "", "", False)
    maths = _numbers(maths.rstrip(". "))
    percent, unit = False, ""
    if found := _PERCENT.search(maths):
        percent, maths = True, maths[: found.start()]
    if money := _MONEY.match(maths):
        unit, maths = _CURRENCY[money[2]], money[1] + maths[money.end() :]
    if base := _BASE.match(maths):
        unit, maths = f"base {int(base[2])}", base[1]
    elif parts := _UNIT.match(maths):
        known = _known_unit(parts[3], parts[4])
        if known or (parts[2] and _WORD.search(parts[3]) and not _WORD.search(_COMMAND.sub(" ", parts[1]))):
            unit, maths = known or unit, parts[1]
    outside = _COMMAND.sub(" ", maths)
    if _WORD.search(outside) or (re.search("[A-Za-z]{2}", outside) and not _MATHS.search(maths)):
        return Reading(words, "", "", False)
    return Reading(words, maths.strip(), unit, percent)


def _rewritten(text: str) -> str:
    """Without delimiters, emphasis and markup; operators and functions as LaTeX writes them."""
    text = text.strip().translate(_UNICODE)
    text = text.strip("* \n") if text.startswith("**") else text
    if not (_MONEY.match(text) and text.count("$") == 1):
        text = re.sub(r"(?<!\\)\$|(?<!\\)\\[()\[\]]", "", text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text.strip()


def _numbers(maths: str) -> str:
    """Mixed numbers, groups of digits, powers of ten and repeating decimals, as math-verify reads them right."""
    if mixed := _MIXED.fullmatch(maths):
        return rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    maths = _GROUPED.sub(lambda m: m[1].replace(" ", ""), maths)
    if not re.search(r"[(\[{]", maths):  # in a tuple a comma divides
        maths = _COMMAS.sub(lambda m: m[0].replace(",", ""), maths)
    maths = _SCIENTIFIC.sub(_plain, maths)
    return _REPEATING.sub(_fraction, maths)


def _plain(number: re.Match[str]) -> str:
    if abs(int(number[2])) > _MOST_EXPONENT:
        return rf"{number[1]}\cdot 10^{{{number[2]}}}"
    return format(Decimal(f"{number[1]}e{number[2]}"), "f")


def _fraction(number: re.Match[str]) -> str:
    r"""0.1\overline{6} -> \frac{1}{6}"""
    whole, once, again = number[1] or "0", number[2], number[3]
    value = Fraction(int(whole + once + again) - int(whole + once), (10 ** len(again) - 1) * 10 ** len(once))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def _known_unit(words: str, power: str | None) -> str:
    """One name for each spelling of a unit; empty: it is none that is known."""
    if "circ" in words:
        return " ".join(["degree", *re.findall("[CFK]", words)])
    words, shape = words.strip(" .").casefold(), ""
    for prefix, exponent in (("square ", "2"), ("sq. ", "2"), ("sq ", "2"), ("cubic ", "3"), ("cu ", "3")):
        if words.startswith(prefix):
            words, shape = words.removeprefix(prefix), exponent
    parts = [part.strip(" .") for part in re.split(r"/| per ", words)]
    if not all(part in _UNITS for part in parts):
        return ""
    return "/".join(_UNITS[part] for part in parts) + (power or shape)


def _same(wanted: Reading, found: Reading) -> bool:
    if not wanted.maths or not found.maths:
        return wanted.text == found.text != ""
    if (wanted.unit and found.unit and wanted.unit != found.unit) or _brackets_differ(wanted.maths, found.maths):
        return False
    if _equal_maths(wanted.maths, found.maths):
        return True
    if wanted.percent == found.percent:
        return False
    # a percent sign on one side alone: 50% is 50 where percents are asked for, and 0.5
    left, right = (rf"\frac{{{one.maths}}}{{100}}" if one.percent else one.maths for one in (wanted, found))
    return _equal_maths(left, right)


def _brackets_differ(one: str, other: str) -> bool:
    r"""(1,2), [1,2] and \{1,2\} differ; 1,2 may be a list of any kind."""
    kinds = [re.match(r"(?:\\?\{|\(|\[)(?=.*,)", maths) for maths in (one, other)]
    return all(kinds) and kinds[0][0][-1] != kinds[1][0][-1]  # type: ignore[index]


def _equal_maths(wanted: str, found: str) -> bool:
    decimals = [len(digits) for digits in re.findall(r"\.(\d+)", f"{wanted} {found}")]
    return _verified(_parsed(wanted), _parsed(found), decimals=max([6, *decimals]))


def _verified(wanted: list[Any], found: list[Any], *, decimals: int) -> bool:
    """decimals: to which decimal numbers are compared."""
    from math_verify import verify

    # The scoring process has a time limit of its own; math-verify's uses signals, which need a main thread.
    return bool(verify(wanted, found, float_rounding=decimals, allow_set_relation_comp=True, timeout_seconds=None))


@lru_cache(maxsize=64)
def _parsed(maths: str) -> list[Any]:
    """math-verify's reading of the whole text: an expression and the text, or the text alone; empty: nothing."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Units are taken off above: math-verify's list has letters in it that are variables.
    rules = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    return list(parse(f"${maths}$", [LatexExtractionConfig(normalization_config=rules)], parsing_timeout=None))
