r"""Read a formula in LaTeX or plain text, and compute its value: exactly where it is rational, else in floats.

    read_formula(r"2\sqrt{3}").value()      3.4641016151377544
    read_formula("1 1/4").value()           Fraction(5, 4)
    read_formula(r"7.\overline{3}").value() Fraction(22, 3)
    read_formula("7 8")                     FormulaError: two numbers in a row

The reader is strict: it reads the whole text or none of it, so that a piece of a formula is never taken for the whole.
It knows numbers (grouped digits, mixed and periodic ones, powers of ten), letters with subscripts, + - * / ^ !, roots,
fractions, brackets, absolute values, rounding, binomials and the functions below. Text becomes numbers by these rules
alone; nothing of it is ever run. Sizes are bounded, so reading and computing take microseconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from rllib_srl.envs.math.size import is_absurd
from rllib_srl.envs.math.values import (
    FUNCTIONS,
    FormulaError,
    Value,
    add,
    binomial_of,
    ceiling_of,
    divide,
    factorial_of,
    floor_of,
    logarithm_of,
    logarithm_to,
    multiply,
    power,
    root_of,
    size_of,
    subtract,
)

MAX_CHARS = 1_000
_MAX_LETTERS = 3  # in a row, as a product; more are a word

Node = Callable[["Place"], Value]  # its value at a place


@dataclass(frozen=True)
class Place:
    """Where a formula is computed: the values of its names, and the base of a logarithm that states none."""

    names: Mapping[str, Value] = field(default_factory=dict)
    log_base: float = 10.0


@dataclass(frozen=True)
class Formula:
    """A formula. Invariant: `names` are all that `at` needs; `unit` is the worth of the last digit of a decimal."""

    at: Node
    names: frozenset[str]
    has_decimals: bool  # written with a decimal point, an exponent of ten: it may be rounded
    is_plain: bool  # one number: digits, a fraction, a mixed number, a power of ten
    is_calculation: bool  # plain numbers with + - * / ^ between them, without a result
    unit: Fraction  # 0 if it is not one decimal

    def value(self, log_base: float = 10.0) -> Value:
        """Return the value of a formula without names.

        Raises:
            FormulaError: it has none.
        """
        return value_at(self, Place(log_base=log_base))


def value_at(formula: Formula, place: Place) -> Value:
    """Return the value of a formula at a place.

    Raises:
        FormulaError: it has none there.
    """
    try:
        value = formula.at(place)
    except (ArithmeticError, ValueError, RecursionError) as error:
        raise FormulaError(f"no value ({type(error).__name__})") from error
    if isinstance(value, complex) and not (math.isfinite(value.real) and math.isfinite(value.imag)):
        raise FormulaError("no finite value")
    if isinstance(value, float) and not math.isfinite(value):
        raise FormulaError("no finite value")
    return value


def read_formula(text: str, is_product: bool = False) -> Formula:
    """Read a formula.

    Args:
        text: LaTeX or plain, without delimiters
        is_product: any number of letters in a row are a product, not a word

    Raises:
        FormulaError: it cannot be read as a whole.
    """
    if len(text) > MAX_CHARS or is_absurd(text):
        raise FormulaError("too large")
    reader = _Reader(levelled(text), is_product)
    try:
        node = reader.expression()
    except RecursionError as error:
        raise FormulaError("nested too deeply") from error
    reader.skip()
    if reader.at != len(reader.text):
        raise FormulaError(f"unread: {reader.text[reader.at : reader.at + 20]!r}")
    operators = reader.operators
    is_number = _NUMBER_FORM.fullmatch(" ".join(reader.text.split())) is not None
    is_calculation = not is_number and not reader.has_structure and operators > 0
    is_one_decimal = reader.has_decimals and reader.num_numbers == 1 and not reader.has_structure and operators == 0
    unit = reader.unit if is_one_decimal or (is_number and reader.has_decimals) else Fraction(0)
    return Formula(node, frozenset(reader.names), reader.has_decimals, is_number, is_calculation, unit)


_SIGNS = {
    "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "×": "*", "·": "*", "⋅": "*", "∗": "*", "∙": "*",
    "÷": "/", "⁄": "/", "−": "-", "–": "-", "°": r"^\circ ", "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ",
    "ω": r"\omega ", "σ": r"\sigma ", "∅": r"\emptyset ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "ℝ": r"\mathbb{R}",
    "½": r"\frac12 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ", "¼": r"\frac14 ", "¾": r"\frac34 ", "⅛": r"\frac18 ",
    "…": r"\ldots ",
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_WRAPPED = re.compile(r"\\(?:mathrm|mathit|mathbf|text|textbf|operatorname\*?|mbox)\s*\{(?P<inside>[^{}]*)\}")
_COMMANDS = (
    (re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|,|;|:|!)(?![a-zA-Z])"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![a-zA-Z])"), r"\\binom"),
    (re.compile(r"\\(?:[lr]?vert|mid)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])|\*\*(?!\*)"), lambda match: "^" if match[0] == "**" else "*"),
    (re.compile(r"\\div(?![a-zA-Z])"), "/"),
    (re.compile(r"\\(?:le|ge|ne)q?(?:slant)?(?![a-zA-Z])"), lambda match: match[0][:3] + " "),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?"), "^\\\\circ "),
    (re.compile(r"\\(?:imath|mathrm\{i\})"), "i"),
    (re.compile(r"\\(?:varnothing|O)(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\(?:quad|qquad| |~)|~"), " "),
)
_GAPS = re.compile("[\u00a0\u2009\u202f\u2007\u2008]")


def levelled(text: str) -> str:
    """Return a formula with one spelling for each sign: no Unicode, no sizes of brackets, no fonts."""
    text = _SUPERSCRIPTS.sub(lambda match: "^{" + match[0].translate(_RAISED) + "}", text)
    text = re.sub(r"(?<=\d),?(?:\\,|\{,\}|\\!)\s?(?=\d{3}(?!\d))", ",", text)  # 1\,234 and 1{,}234
    text = re.sub(r"(?<=\d),\\!(?=\d{3})", ",", text)
    text = re.sub(r"(?<=\d)(?:\\ |~)(?=\d{3}(?!\d))", " ", text)
    text = _GAPS.sub(" ", text)
    for sign, put in _SIGNS.items():
        if sign in text:
            text = text.replace(sign, put)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    return _WRAPPED.sub(lambda match: f" {match['inside']} ", text).strip()


_GROUPED = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d{1,3}(?:'\d{3})+|\d{1,3}(?:_\d{3})+|\d{1,2}(?:,\d{2})+,\d{3}"
_NUMBER = re.compile(
    rf"(?P<periodic>(?P<head>\d{{0,60}})\.(?P<fixed>\d{{0,60}})"
    r"(?:\\overline\s*\{?(?P<bar>\d{1,30})\}?|\\bar\s*\{?(?P<bar2>\d{1,30})\}?|\((?P<round>\d{1,30})\)(?!\s*[\^!])"
    r"|\\dot\s*\{?(?P<dot>\d)\}?(?:\\dot\s*\{?(?P<dot2>\d)\}?)?|(?P<dots>(?:\.\.\.|\\l?dots\b|\\cdots\b))))"
    rf"|(?P<grouped>(?:{_GROUPED})(?!\d)(?:\.\d{{1,60}})?)"
    r"|(?P<digits>\d{1,400}(?:\.(?!\d{3}\.)\d{0,400})?|\.\d{1,400})",
    re.ASCII,
)
_EXPONENT = re.compile(r"[eE](?P<exponent>[+-]?\d{1,3})(?![\w.^])", re.ASCII)
_BASE = re.compile(r"\s*_\s*(?:\{\s*(?:\w+)\s*\}|\w)")
_OVER = re.compile(r"(?P<gap>\s*)(?P<over>\d{1,30})\s*/\s*(?P<under>\d{1,30})(?![\d.,^!(])", re.ASCII)
_FRAC = re.compile(
    r"\s*\\frac\s*(?:\{\s*(?P<over>\d{1,30})\s*\}|(?P<over1>\d))\s*(?:\{\s*(?P<under>\d{1,30})\s*\}|(?P<under1>\d))",
    re.ASCII,
)
_INTEGER = rf"(?:{_GROUPED}|\d+)"
_DECIMAL = rf"(?:(?:{_INTEGER})(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_FRACTION = rf"(?:{_INTEGER} ?/ ?{_INTEGER}|\\frac ?(?:\{{ ?-?{_INTEGER} ?\}}|\d) ?(?:\{{ ?-?{_INTEGER} ?\}}|\d))"
_TEN = r"10 ?\^ ?(?:\{ ?[+-]?\d+ ?\}|\([+-]?\d+\)|-?\d+)"
_NUMBER_FORM = re.compile(
    rf"[+-]? ?(?:\d* ?{_FRACTION}|\(? ?-? ?{_FRACTION} ?\)?|\(?-?{_DECIMAL}\)?|(?:{_DECIMAL} ?[*xX] ?)?{_TEN}"
    r"|\d*\.\d*(?:\\overline|\\bar|\\dot|\(|\.\.\.|\\l?dots|\\cdots)[\d\\dot{}() ]*)",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z]+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{(?P<long>[\w+\-, ]{1,20})\}|(?P<short>\w))", re.ASCII)
_GREEK = frozenset((
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta", "kappa",
    "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta",
    "Theta", "Lambda", "Sigma", "Phi", "Psi", "Omega", "infty", "ell",
))  # fmt: skip
_PLAIN_NAMES = {"pi": "pi", "infinity": "infty", "inf": "infty", "oo": "infty"} | {
    name: name for name in _GREEK if len(name) > 3
}


_ANGLES = frozenset(("sin", "cos", "tan", "sec", "csc", "cot"))
_NAMED = sorted((*FUNCTIONS, "log", "sqrt", "cbrt", *_PLAIN_NAMES), key=len, reverse=True)
_KNOWN = re.compile(rf"(?:{'|'.join(_NAMED)})(?![A-Za-z])|(?:sqrt|pi)(?![A-Za-z])")


class _Reader:
    """A descent over one text. Invariant: `at` is behind what was read."""

    def __init__(self, text: str, is_product: bool):
        self.text, self.at, self._is_product = text, 0, is_product
        self.names: set[str] = set()
        self.has_decimals = self.has_structure = False  # structure: names, functions, roots, brackets of rounding
        self.num_numbers = self.operators = 0
        self.unit = Fraction(0)
        self._num_bars = 0
        self._in_angle = False

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _next(self) -> str:
        self.skip()
        return self.text[self.at : self.at + 1]

    def _take(self, sign: str) -> bool:
        self.skip()
        if self.text.startswith(sign, self.at):
            self.at += len(sign)
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise FormulaError(f"expected {sign!r} at {self.text[self.at : self.at + 20]!r}")

    def expression(self) -> Node:
        node = self._term()
        while (sign := self._next()) and sign in "+-":
            self.at += 1
            self.operators += 1
            node = _combined(add if sign == "+" else subtract, node, self._term())
        return node

    def _term(self) -> Node:
        node = self._signed()
        while True:
            sign = self._next()
            if sign and sign in "*/":
                self.at += 1
                self.operators += 1
                node = _combined(multiply if sign == "*" else divide, node, self._signed())
            elif (cross := self._cross()) or self._starts_factor():
                self.operators += bool(cross)
                node = _combined(multiply, node, self._powered())
            else:
                return node

    def _cross(self) -> bool:
        """Take an x that stands for "times": between two numbers, the second one a power of ten."""
        match = re.compile(r"\s*[xX]\s*(?=10\s?\^)").match(self.text, self.at)
        if not match or not self.text[: self.at].rstrip()[-1:].isdigit():
            return False
        self.at = match.end()
        return True

    def _starts_factor(self) -> bool:
        sign = self._next()
        if not sign or sign.isdigit() or sign == ".":
            return False
        if sign == "\\":
            name = _COMMAND.match(self.text, self.at)
            stops = (
                "rfloor", "rceil", "in", "cup", "cap", "le", "ge", "ne", "pm", "mp", "circ", "to", "approx", "pmod",
            )  # fmt: skip
            return name is not None and name[0][1:] not in (*stops, "bmod", "mod", "or", "and")
        return sign.isalpha() or sign in "({" or (sign == "|" and not self._num_bars)

    def _signed(self) -> Node:
        if self._take("-"):
            node = self._signed()
            return lambda place: -node(place)
        if self._take("+"):
            return self._signed()
        return self._powered()

    def _powered(self) -> Node:
        node = self._postfix(self._atom())
        if self.text.startswith("^\\circ", self.at) or not self._take("^"):
            return node
        self.operators += 1
        exponent = self._exponent()
        return self._postfix(_combined(power, node, exponent))

    def _exponent(self) -> Node:
        if self._next() == "-":
            self.at += 1
            node = self._exponent()
            return lambda place: -node(place)
        if self._next().isdigit():
            node = self._number(is_exponent=True)
        else:
            node = self._argument()
        if self._take("^"):
            return _combined(power, node, self._exponent())
        return node

    def _postfix(self, node: Node) -> Node:
        while True:
            if self.text.startswith("^\\circ", self.at):
                self.at += len("^\\circ")
                if self._in_angle:
                    node = _combined(multiply, node, lambda place: math.pi / 180)
            elif self._next() == "!" and not self.text.startswith("!=", self.at):
                self.at += 1
                if self._next() == "!":
                    raise FormulaError("a double factorial")
                self.has_structure = True
                node = _applied(factorial_of, node)
            elif self._next() == "%" or self.text.startswith("\\%", self.at):
                self.at = self.text.index("%", self.at) + 1
                node = _combined(divide, node, _constant(Fraction(100)))
            else:
                return node

    def _atom(self) -> Node:
        sign = self._next()
        if sign.isdigit() or sign == ".":
            return self._mixed(self._number())
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if sign == opening:
                self.at += 1
                node = self.expression()
                self._expect(closing)
                return node
        if sign == "|":
            self.at += 1
            self.has_structure = True
            self._num_bars += 1
            node = self.expression()
            self._expect("|")
            self._num_bars -= 1
            return _applied(size_of, node)
        if sign == "\\":
            return self._command()
        if sign.isalpha() and sign.isascii():
            return self._word()
        raise FormulaError(f"unread: {self.text[self.at : self.at + 20]!r}")

    def _number(self, is_exponent: bool = False) -> Node:
        self.skip()
        match = _NUMBER.match(self.text, self.at)
        if not match or (is_exponent and not match["digits"]):
            raise FormulaError("not a number")
        self.at = match.end()
        self.num_numbers += 1
        if match["periodic"]:
            value = self._periodic(match)
        else:
            digits = re.sub("[, '_]", "", match[0]).removesuffix(".")
            value = Fraction(digits)
            places = len(digits.partition(".")[2])
            exponent = None if is_exponent else _EXPONENT.match(self.text, self.at)
            if exponent:
                self.at = exponent.end()
                value *= Fraction(10) ** int(exponent["exponent"])
                places -= int(exponent["exponent"])
            if "." in digits or exponent:
                self.has_decimals = True
                self.unit = Fraction(10) ** -places
        if _BASE.match(self.text, self.at) or self.text[self.at : self.at + 1] in ("_", "'"):
            raise FormulaError("a number with a subscript")
        after = self.text[self.at : self.at + 1]
        if after.isdigit() or after in (".", ","):
            raise FormulaError("not a number")
        return _constant(value)

    def _periodic(self, match: re.Match[str]) -> Fraction:
        """Return the value of 0.1(6), and of 0.1666..., whose end repeats."""
        fixed = match["fixed"]
        period = match["bar"] or match["bar2"] or match["round"] or (match["dot"] or "") + (match["dot2"] or "")
        if match["dots"]:
            lengths = (n for n in range(1, len(fixed) // 2 + 1) if fixed[-n:] == fixed[-2 * n : -n])
            length = next(lengths, 0)
            period = fixed[-length:] if length else ""
            self.has_decimals |= not period
        elif not period:
            raise FormulaError("not a number")
        value = Fraction(int((match["head"] or "0") + fixed), 10 ** len(fixed))
        if period and set(period) != {"0"}:
            value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
        return value

    def _mixed(self, whole: Node) -> Node:
        """Add the fraction of 1 1/4 and of 1\\frac{1}{4}."""
        value = whole(Place())
        if not isinstance(value, Fraction) or value.denominator != 1 or not self.text[self.at - 1].isdigit():
            return whole
        match = _FRAC.match(self.text, self.at) or _OVER.match(self.text, self.at)
        if match is None or (match.re is _OVER and not match["gap"]):
            return whole
        groups = match.groupdict()
        over, under = (int(groups[name] or groups.get(f"{name}1") or 0) for name in ("over", "under"))
        if not 0 < over < under:
            return whole
        self.at = match.end()
        self.num_numbers += 2
        return _constant(value + Fraction(over, under))

    def _argument(self) -> Node:
        r"""Return what a command takes: {...}, (...), or one sign, as in \frac12."""
        sign = self._next()
        if sign.isdigit():
            self.at += 1
            self.num_numbers += 1
            return _constant(Fraction(sign))
        if sign.isalpha() and sign.isascii() and not _KNOWN.match(self.text, self.at):
            self.at += 1
            return self._letter(sign)
        return self._atom()

    def _command(self) -> Node:
        match = _COMMAND.match(self.text, self.at)
        if not match:
            raise FormulaError("not a command")
        name, self.at = match[0][1:], match.end()
        if name == "frac":
            over, under = self._argument(), self._argument()
            self.operators += 1
            return _combined(divide, over, under)
        if name == "binom":
            self.has_structure = True
            return _combined(binomial_of, self._argument(), self._argument())
        if name in ("lfloor", "lceil"):
            self.has_structure = True
            node = self.expression()
            self._expect("\\rfloor" if name == "lfloor" else "\\rceil")
            return _applied(floor_of if name == "lfloor" else ceiling_of, node)
        if name == "lbrace" or (name not in FUNCTIONS and name not in ("log", "sqrt", "pi", *_GREEK)):
            raise FormulaError(f"unknown command {name}")
        return self._named(name)

    def _word(self) -> Node:
        known = _KNOWN.match(self.text, self.at)
        if known:
            self.at = known.end()
            return self._named(_PLAIN_NAMES.get(known[0], known[0]))
        root = re.compile("sqrt(?=[A-Za-z0-9])").match(self.text, self.at)
        if root:
            self.at = root.end()
            return self._named("sqrt")
        run = _NAME.match(self.text, self.at)
        assert run is not None
        if len(run[0]) > _MAX_LETTERS and not self._is_product:
            raise FormulaError(f"the word {run[0]!r}")
        if len(run[0]) > 1 and run[0].endswith("pi") and run[0][:-2] == "":
            return self._named("pi")
        self.at += 1
        return self._letter(run[0][0])

    def _letter(self, letter: str) -> Node:
        self.has_structure = True
        subscript = _SUBSCRIPT.match(self.text, self.at)
        if subscript:
            self.at = subscript.end()
            letter += "_" + "".join((subscript["long"] or subscript["short"]).split())
        elif letter == "e":
            return _constant(math.e)
        elif letter == "i":
            return _constant(1j)
        if self.text[self.at : self.at + 1] == "'":
            raise FormulaError("a derivative")
        self.names.add(letter)
        return lambda place: place.names[letter]

    def _named(self, name: str) -> Node:
        self.has_structure = True
        if name == "pi":
            return _constant(math.pi)
        if name in _GREEK:
            return self._letter(name)
        if name in ("sqrt", "cbrt"):
            degree: Node = _constant(Fraction(3 if name == "cbrt" else 2))
            if name == "sqrt" and self._take("["):
                degree = self.expression()
                self._expect("]")
            sign = self._next()
            node = self._number() if sign.isdigit() and not self._is_tight() else self._argument()
            return _combined(root_of, node, degree)
        raised = base = None
        for _ in range(2):
            if base is None and name == "log" and self._take("_"):
                sign = self._next()
                base = self._number(is_exponent=True) if sign.isdigit() and self._is_spaced() else self._argument()
            if raised is None and self._next() == "^":
                self.at += 1
                raised = self._exponent()
        node = self._applied_to(name)
        if name == "log":
            node = _combined(logarithm_to, node, base) if base else _logarithm(node)
        else:
            node = _applied(FUNCTIONS[name], node)
        if raised is None:
            return node
        if raised(Place(dict.fromkeys(self.names, Fraction(2)))) == -1:
            raise FormulaError("an inverse function or a power")
        return _combined(power, node, raised)

    def _is_tight(self) -> bool:
        r"""Return whether LaTeX takes one digit here: \sqrt12 is the root of 1, times 2, and nobody means it."""
        return False

    def _is_spaced(self) -> bool:
        """Return whether the digits of a base end before a space: log_10 5."""
        match = re.compile(r"\d+(?=\s|\(|\{)").match(self.text, self.at)
        return match is not None

    def _applied_to(self, name: str) -> Node:
        before, self._in_angle = self._in_angle, name in _ANGLES
        sign = self._next()
        if sign and sign in "([{|":
            node = self._postfix(self._atom())
        else:
            node = self._signed()
            while self._starts_factor() and not self._starts_function():
                node = _combined(multiply, node, self._powered())
            if self._next() in ("/", "*"):
                raise FormulaError("a function of a quotient without brackets")
        self._in_angle = before
        return node

    def _starts_function(self) -> bool:
        match = re.compile(r"\\?([a-zA-Z]+)").match(self.text, self.at)
        return match is not None and (match[1] in FUNCTIONS or match[1] == "log")


def _constant(value: Value) -> Node:
    return lambda place: value


def _combined(function: Callable[[Value, Value], Value], a: Node, b: Node) -> Node:
    return lambda place: function(a(place), b(place))


def _applied(function: Callable[[Value], Value], node: Node) -> Node:
    return lambda place: function(node(place))


def _logarithm(node: Node) -> Node:
    return lambda place: logarithm_of(node(place), place.log_base)
