r"""Right answers earn 1 and wrong ones 0, over pairs of every class; every row is worked by hand.

(gold, turns that are right, turns that are wrong)
"""

from rllib_srl.envs.math.final_answers import graded

# fmt: off
NUMBER = [
    ("0", ["0", r"\boxed{0}", "0.0"], ["1e-9", "0.001", r"\boxed{-1}"]),
    ("2.5", ["2.5", r"\boxed{\frac{5}{2}}", "2.50", "5/2", r"\boxed{2\frac12}"], ["2.6", "25", r"\boxed{\frac{2}{5}}"]),
    (r"\frac{2}{3}", [r"\boxed{\dfrac{2}{3}}", "2/3", "0.666667", r"\boxed{\tfrac23}"],
     ["0.67", "3/2", r"\boxed{\frac{2}{-3}}"]),
    ("10", [r"\boxed{10}", "It is 10."],
     [r"\boxed{10^2}", r"\boxed{\sqrt{10}}", r"\boxed{e^{10}}", "log(10)", r"\boxed{10x}"]),
    ("4", [r"\boxed{|-4|}", r"\boxed{\sqrt{16}}", "4"],
     [r"\boxed{\ln 4}", r"\boxed{4!}", "cos 4", r"\boxed{\sqrt 4}", r"\boxed{4i}"]),
    ("9", [r"\boxed{9}", r"\boxed{\lfloor 9.7 \rfloor}"],
     ["square root of 9", "9 squared", "twice 9", r"\boxed{9\pi}", r"\boxed{9_{11}}"]),
    ("3", ["4 is wrong, it is 3", r"\boxed{4} is wrong; \boxed{3}", "3 must be right", r"\boxed{3} is right"],
     [r"\boxed{3} is wrong", "<answer>3</answer>, which is incorrect", "3 does not work", "3 looks wrong",
      "3, which is wrong", "The answer is 3, which is wrong.", "3 might be wrong", "3 fails"]),
    ("1/7", ["1/7", "0.142857", r"\boxed{0.\overline{142857}}"], ["142857/1000000", "0.14", "1.7"]),
]
SIZES = [
    ("9.11e-31", ["9.11e-31", r"\boxed{9.11 \times 10^{-31}}", "9.11 x 10^-31"],
     ["9.12e-31", "9.11e-30", "0", "-9.11e-31"]),
    ("0.0000004", ["4e-7", r"\boxed{4 \cdot 10^{-7}}"], ["0", "0.0000005", "4e-6", "4e-8"]),
    (r"2^{64}", [r"\boxed{2^{64}}", "18446744073709551616", r"\boxed{4^{32}}"],
     ["18446744073709551615", r"\boxed{2^{63}}", "1.8e19"]),
    (r"3^{-50}", [r"\boxed{\frac{1}{3^{50}}}"], [r"\boxed{3^{-49}}", "0", r"\boxed{-3^{50}}"]),
]
PERCENT = [
    ("25%", ["25%", "0.25", r"\boxed{\frac14}", "25 percent", r"\boxed{25\%}"],
     ["2500%", "0.25%", "2.5%", "2.5", "26%"]),
    ("0.4", ["40%", "0.4", "2/5"], ["0.4%", "4%", "400%", "40"]),
    ("80", ["80%", "80", "80 percent"], ["0.8%", "8000%", "0.8", "8%"]),
    (r"66\frac{2}{3}\%", [r"\boxed{66\frac23\%}", r"\boxed{\frac{200}{3}\%}", "2/3"],
     ["66%", r"\boxed{\frac{20}{3}\%}", "6667%"]),
]
WORDED = [
    ("2.4 million", ["2,400,000", "About 2.4 million", r"\boxed{2.4 \text{ million}}"],
     ["2.4", "2.4 billion", "24 million", "240,000", "-2.4 million", "-$2.4 million",
      r"\boxed{-2.4 \text{ million}}"]),
    ("-2.4 million", ["-2,400,000", "\u22122.4 million", "-$2.4 million", "negative 2.4 million"],
     ["2.4 million", "2,400,000"]),
    ("seven", ["7", "Seven."], ["-seven", "minus seven"]), ("twenty-five", ["25"], ["-twenty-five", "-25"]),
    ("12", ["twelve", "The answer is twelve.", r"\boxed{\text{twelve}}"], ["twenty", "eleven", "twelve thousand"]),
    ("3/4", ["three quarters", "three fourths", "0.75"], ["three", "four thirds", "three fifths"]),
    ("3/5", ["3 fifths", "three fifths", r"\boxed{3\text{ fifths}}"], ["5 thirds", "3 tenths", "3 fifth"]),
    ("0.03", ["3 hundredths"], ["3 hundreds", "3 tenths", "3 thousandths"]),
    ("3", ["3 fifth graders"], ["3 fifths", "3-fifths", "3 tenths", "3 hundredths of a second",
      "3 millions", "3 dozens", "3 lakh", r"\boxed{3\text{ fifths}}", "The answer is 3 tenths."]),
    ("twenty-third", ["Twenty-third"], ["20/3", "23"]),
]
GROUPED = [
    ("7654321", ["7 654 321", "7,654,321", r"\boxed{7{,}654{,}321}", r"\boxed{7\,654\,321}", "7'654'321"],
     ["7 654 312", "7 654", "7654", "7,654"]),
    ("25000", ["25 000", "25,000", r"\boxed{25\ 000}"], ["25", "25 00", "25,00", "2 500", "25.000"]),
    ("1,048,576", ["1048576", "1 048 576"], ["1,048", "1048,576", "1, 048, 576"]),
]
MIXED = [
    ("7/3", ["2 1/3", r"\boxed{2\frac{1}{3}}", r"\boxed{\frac{7}{3}}"], ["2 2/3", "21/3", r"\boxed{2\frac{3}{1}}"]),
    ("-2.5", ["-2 1/2", r"\boxed{-2\frac12}", r"\boxed{-\frac{5}{2}}"], ["2 1/2", "-1.5", "-21/2"]),
]
PERIODIC = [
    ("4", ["4.0", "It is 4."], [r"4.\overline{6}", r"\boxed{4.\overline{4}}", "4.(4)"]),
    ("1/3", [r"\boxed{0.\overline{3}}", "0.(3)", "0.333..."],
     ["0.3", r"\boxed{3.\overline{3}}", "0.33", r"\boxed{0.\overline{03}}"]),
    (r"0.\overline{27}", [r"\boxed{\frac{3}{11}}", r"\boxed{0.\overline{27}}", "3/11"],
     ["0.27", "27/100", r"\boxed{0.2\overline{7}}"]),
]
BASES = [
    ("1101_2", [r"\boxed{1101_2}", r"\boxed{1101_{2}}", "1101_2"], ["1101", "1101_3", r"\boxed{1011_2}", "13"]),
    ("101_2", [r"\boxed{N = 101_2}", "So 5 = 101_2.", r"\boxed{101_2 = 5}"],
     ["-101_2", r"\boxed{-101_2}", r"\boxed{2\cdot 101_2}", "It is 101_2 + 1.", r"\boxed{101_2, 1}", r"\boxed{101_2^2}",
      r"\boxed{\frac{101_2}{2}}"]),
    ("A3_{16}", [r"\boxed{A3_{16}}", "A3_16", r"\boxed{\text{A3}_{16}}"], ["A3", "3A_{16}", "A3_{15}"]),
    ("19", ["19", r"\boxed{19_{10}}"], [r"\boxed{19_{12}}", "19_8", r"\boxed{23_8}"]),
]
UNITS = [
    ("12 apples", ["12", "12 apples", r"\boxed{12 \text{ apples}}"], ["12 oranges", "21 apples", r"\boxed{21}"]),
    (r"60\text{ km/h}", [r"\boxed{60}", r"\boxed{60 \text{ km/h}}", "60 km/h"], ["60 m/s", "6 km/h", r"\boxed{66}"]),
    ("18 square meters", [r"\boxed{18}", r"\boxed{18\text{ m}^2}", "18 square meters"],
     ["18 m^3", "81", "18 square feet"]),
    (r"45^\circ", [r"\boxed{45}", r"\boxed{45^{\circ}}", "45 degrees"], ["54", r"\boxed{45\pi}", r"\boxed{54^\circ}"]),
    ("$4.50", ["4.5", r"\boxed{\$4.50}", "4.50 dollars", "$4.50"], ["$45.0", "4.05", "450", "$5.40"]),
    ("90 minutes", ["90", "90 min", "1.5 hours"], ["90 hours", "1.5", "9 minutes", "1.5 minutes"]),
    ("18", ["She makes $18 per day.", "$18 a day", "18 an hour", "#### 18 per day", "18 red balls", "18 men", "18 m",
      "18 g", r"\boxed{18 \text{ per day}}", "18 m/s", "18 m^2", r"\boxed{18\text{ m}^2}", "Answer: 18 per week"],
     ["18 x", "18 k", "18 M", "18 pi", "18 per cent of 50", "18 n", r"\boxed{18 y}", "180 per day", "18 per 20"]),
    ("60 miles per hour", ["60 miles an hour", "60 mph", "60"], ["60 miles a day", "60 km per hour", "60 miles"]),
]
CHOICE = [
    ("C", ["C", "(C)", r"\boxed{C}", r"\boxed{\text{(C)}}", "C. A long text", "The answer is C since A is too small."],
     ["A", "D", "The answer is A since C is too small.", "It is A; C is wrong.", "C or D", "A and C"]),
    ("A", ["The answer is A, not B.", "Answer: A because D is even", r"\boxed{\textbf{(A)}}", "Option A"],
     ["The answer is B, not A.", "Answer: D because A is even", "A, B", r"\boxed{B}", "not A"]),
    ("(D)", ["D", r"\boxed{D}", "(D) 12", "I choose D."], ["(E)", "Not D, so E.", "E, as D fails", r"\boxed{E}"]),
    ("A", ["I choose A over C.", "A after eliminating C", "The answer is A with high confidence", "Option A obviously",
      "I'd pick A here", "B is ruled out, so A holds.", "A rather than C"],
     ["A clearly wrong choice is B.", "A quick look says C", "C over A"]),
    ("C", ["I choose C over A.", "C, after ruling out B"],
     ["I choose A over C", "A after eliminating C", "B despite C", "B without C", "A with C"]),
]
NAMES = [
    ("J. K. Rowling", ["J. K. Rowling", "The answer is J. K. Rowling.", r"\boxed{\text{J. K. Rowling}}"],
     ["J. R. R. Tolkien", "J. S. Bach", "J", "(J)"]),
    ("E. coli", ["E. coli", "**E. coli**"], ["E. faecalis", "E"]),
    ("(B) Paris", ["B", "(B)", "B. Paris"], ["A", "(A) Paris"]),
]
YES_NO = [
    ("no", ["No, it is not.", "no", "No.", "The answer is no.", r"\boxed{\text{No}}"],
     ["Yes, it is.", "I have no idea.", "No one knows.", "yes", "on", "Yes and no"]),
    ("no", ["It's false", "It is not true.", "That isn't true", "Not true, because 9 is odd."],
     ["It's true.", "It is not false.", "I do not know if it is true.", "I don't think it is not true."]),
    ("yes", ["It's true.", "That\u2019s true", "It is true."],
     ["It's false", "It is not true.", "The opposite is true.", "I doubt it is true", "It's not true"]),
    ("Yes", ["yes", "Yes, because 7 is prime.", r"\boxed{\text{yes}}", "Yes!"],
     ["No", "No, it is not a yes.", "not yes", "yes or no", "maybe"]),
    ("false", ["False", "False, since 9 is odd.", r"\boxed{\text{False}}"], ["True", "true", "not false"]),
]
WORD = [
    ("Berlin", ["Berlin", "berlin.", r"\boxed{\text{Berlin}}", "The answer is Berlin."],
     ["Bonn", "Berlin or Bonn", "not Berlin", "Berliner", "nilreB"]),
    ("Paris", ["The answer is Paris because it is the capital.", "Answer: Paris, since it is"],
     ["The answer is Rome because it is not Paris", "Paris, as in Texas", "Because Paris"]),
    ("Because of You", ["Because of You"], ["of You"]), ("caf\u00e9", ["cafe\u0301"], ["cafe"]),
    ("O'Brien", ["O\u2019Brien"], ["OBrien"]),
    ("COVID-19", ["COVID-19"], ["COVID-18", "19"]),
    ("abc", ["abc", r"\boxed{abc}", "ABC"], ["cba", r"\boxed{bca}", "ab", "abcd"]),
    ("mn", ["mn", r"\boxed{mn}"], ["nm", r"\boxed{nm}", "m"]),
    ("12 Main Street", ["12 Main Street"], ["21 Main Street", "12", "Main Street"]),
    ("1969\u20131974", ["1969-1974", "1969 - 1974", r"\boxed{1969-1974}"], ["1970-1975", "-5", "1974-1969", "1969"]),
    ("7-5", ["7-5", "Answer: 7-5"], ["3-1", "2", "5-7"]), ("555-0100", ["555-0100"], ["455", "555-100", "-455"]),
    ("+1-800-555-0199", ["+1-800-555-0199"], ["-1553", "1-800-555-0198"]),
]
PRODUCT = [
    ("$abc$", [r"\boxed{cba}", "$bca$", r"\boxed{abc}"], [r"\boxed{ab}", r"\boxed{a+b+c}", r"\boxed{abd}"]),
    (r"\boxed{pq}", [r"\boxed{qp}", "$pq$"], [r"\boxed{p+q}", r"\boxed{pr}"]),
]
LISTS = [
    ("4, 9, 25", [r"\boxed{4, 9, 25}", r"\boxed{25, 9, 4}", "4, 9 and 25", r"\boxed{4}, \boxed{9}, \boxed{25}",
      r"\boxed{\{4, 9, 25\}}"],
     [r"\boxed{4, 9}", r"\boxed{4, 9, 24}", r"\boxed{25}", r"\boxed{4}, \boxed{9}", r"\boxed{4, 9, 25, 36}"]),
    ("-3, 6", ["x = -3 or x = 6", r"\boxed{x = 6 \text{ or } x = -3}", "6 and -3", r"\boxed{-3} and \boxed{6}"],
     ["x = 3 or x = -6", "-3", r"\boxed{6}", "x = -3", r"\boxed{-3, -6}", "36"]),
    (r"\sqrt{2}, -\sqrt{2}", [r"\boxed{-\sqrt{2}, \sqrt{2}}", r"\boxed{\pm\sqrt{2}}", r"\boxed{x = \pm \sqrt{2}}"],
     [r"\boxed{\sqrt{2}}", r"\boxed{2, -2}", r"\boxed{\pm 2}"]),
    ("A, C", ["A and C", r"\boxed{C, A}"], ["A", "A, B"]), (r"\pm 2", ["2, -2"], ["2"]),
    ("1331 and 1728", [r"\boxed{1331, 1728}"], ["1331"]),
    (r"1 \text{ or } -2", [r"\boxed{a=1 \text{ or } a=-2}"], ["1"]),
    ("1, 1, 2", [r"\boxed{1, 2, 1}"], [r"\boxed{1, 2}", r"\boxed{1, 2, 2}"]),
    ("13", [r"\boxed{13}, that is \boxed{13.0}"],
     [r"\boxed{13}, \boxed{14}", r"\boxed{13, 14}", r"\boxed{13 \text{ or } 14}"]),
]
SETS = [
    (r"\{2, 4, 6\}", [r"\boxed{\{6, 4, 2\}}", r"\boxed{\left\{2,4,6\right\}}", r"\boxed{2, 4, 6}"],
     [r"\boxed{\{2, 4\}}", r"\boxed{(2, 4, 6, 8)}", r"\boxed{\{2, 4, 7\}}"]),
    (r"\varnothing", [r"\boxed{\emptyset}", r"\boxed{\{\}}", "\u2205"], [r"\boxed{0}", r"\boxed{\{0\}}", r"\boxed{1}"]),
    (r"\{0\}", [r"\boxed{\{0\}}"], [r"\boxed{\emptyset}", r"\boxed{\{1\}}"]),
]
INTERVALS = [
    ("[2, 7)", [r"\boxed{[2, 7)}", r"\boxed{2 \le x < 7}", r"\boxed{\left[2, 7\right)}"],
     [r"\boxed{(2, 7)}", r"\boxed{[2, 7]}", r"\boxed{[7, 2)}", r"\boxed{2 < x < 7}"]),
    (r"(-\infty, 3]", [r"\boxed{(-\infty, 3]}", r"\boxed{x \leq 3}", "(-\u221e, 3]"],
     [r"\boxed{(-\infty, 3)}", r"\boxed{x < 3}", r"\boxed{[3, \infty)}"]),
    (r"(-\infty,-1)\cup(1,\infty)", [r"\boxed{(-\infty, -1) \cup (1, \infty)}", r"\boxed{(1,\infty)\cup(-\infty,-1)}"],
     [r"\boxed{(-1, 1)}", r"\boxed{(-\infty, -1)}", r"\boxed{(-\infty, -1] \cup [1, \infty)}"]),
    ("x < 1 or x > 3", [r"\boxed{(-\infty, 1) \cup (3, \infty)}"], [r"\boxed{(1, 3)}", "x < 1 and x > 3"]),
    (r"\{x : x > 3\}", ["x > 3", r"\boxed{(3, \infty)}"], ["x > 4", "3"]),
    ("x > 4", [r"\boxed{x > 4}", "4 < x", r"\boxed{(4, \infty)}"],
     [r"\boxed{x < 4}", r"\boxed{x \ge 4}", r"\boxed{x = 4}", r"\boxed{4}"]),
]
TUPLES = [
    ("(3, -5)", [r"\boxed{(3, -5)}", r"\boxed{\left(3, -5\right)}", r"\boxed{(3.0, -5)}"],
     [r"\boxed{(-5, 3)}", r"\boxed{(3, 5)}", r"\boxed{\{3, -5\}}", r"\boxed{(3, -5, 0)}"]),
    ("(0, 1), (2, 3)", [r"\boxed{(2, 3), (0, 1)}", "(0, 1) and (2, 3)"],
     [r"\boxed{(1, 0), (2, 3)}", r"\boxed{(0, 1)}"]),
]
EQUATIONS = [
    ("y = 3x - 2", [r"\boxed{y = 3x - 2}", r"\boxed{y = -2 + 3x}", r"\boxed{3x - y = 2}"],
     [r"\boxed{y = 3x + 2}", r"\boxed{y = 2x - 3}", r"\boxed{x = 3y - 2}"]),
    ("x = 6", [r"\boxed{x = 6}", r"\boxed{6}", "6 = x"],
     [r"\boxed{x = -6}", r"\boxed{y = 6}", r"\boxed{x^2 = 36}", r"\boxed{x = 5}"]),
    ("x^2 + y^2 = 9", [r"\boxed{x^2 + y^2 = 9}", r"\boxed{y^2 + x^2 - 9 = 0}"],
     [r"\boxed{x^2 + y^2 = 3}", r"\boxed{x^2 - y^2 = 9}", r"\boxed{9}"]),
]
NOTATIONS = [
    (r"\mathbb{R}", [r"\boxed{\mathbb R}", r"$x \in \mathbb R$"], [r"\boxed{\mathbb Q}", r"\boxed{\mathbb{Z}}"]),
    (r"\{1,2,3\}", ["{3,2,1}", r"\boxed{{1, 2, 3}}"], ["{3,2}", "{1,2,4}", "(1,2,3)"]),
    (r"\langle 1, 2 \rangle", [r"\boxed{\left\langle 1,2\right\rangle}", r"\langle 1,\,2 \rangle"],
     [r"\boxed{\langle 2, 1 \rangle}", "(1, 2)", r"1 \le x \le 2", r"\boxed{\langle 1, 2, 0 \rangle}"]),
    (r"(3,\pi/2)", [r"\boxed{(r,\theta)=(3,\pi/2)}"], [r"\boxed{(r,\theta)=(\pi/2,3)}"]),
    ("(1,2)", ["$x=1$ and $y=2$", r"\boxed{x=1}, \boxed{y=2}"], ["$x=2$ and $y=1$", r"\boxed{1}, \boxed{2}", "$x=1$"]),
    ("25 \u00b0C", ["25 degrees Celsius", "25 degrees"], ["25 degrees Fahrenheit", "52 degrees Celsius"]),
    ("18", [r"\boxed{\boldsymbol{18}}", r"\boxed{\color{blue}{18}}"], [r"\boxed{\mathbf{81}}"]),
    (r"\frac34", [r"\boxed{\mathbf{\dfrac34}}"], [r"\boxed{\mathbf{\dfrac43}}", r"\boxed{\mathbf{\frac34}x}"]),
]
EXPRESSIONS = [
    ("3x^2 - 2x", [r"\boxed{x(3x - 2)}", r"\boxed{-2x + 3x^2}", "3x^2 - 2x", r"\boxed{f(x) = 3x^2 - 2x}"],
     [r"\boxed{3x^2 + 2x}", r"\boxed{3x - 2}", r"\boxed{3y^2 - 2y}", r"\boxed{x}"]),
    (r"\frac{x+1}{x-1}", [r"\boxed{\frac{1+x}{x-1}}", "(x+1)/(x-1)", r"\boxed{1 + \frac{2}{x-1}}"],
     [r"\boxed{\frac{x-1}{x+1}}", "x+1/x-1", r"\boxed{\frac{x+1}{1-x}}"]),
    (r"\frac{3\pi}{4}", ["3pi/4", r"\boxed{0.75\pi}", "(3\u03c0)/4", "3*pi/4"],
     ["3/4", r"\boxed{\frac{4\pi}{3}}", "3pi", r"\boxed{\frac{3}{4\pi}}"]),
    (r"5\sqrt{7}", ["5\u221a7", "5*sqrt(7)", r"\boxed{\sqrt{175}}", "sqrt(175)"],
     ["5", "sqrt(57)", "\u221a7", r"\boxed{7\sqrt{5}}", "35"]),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", [r"It is \boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"],
     [r"It is \boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}", "10", r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}"]),
    (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", [r"\boxed{\left(\begin{array}{cc}1&2\\3&4\end{array}\right)}"],
     [r"\boxed{\left(\begin{array}{cc}1&2\\4&3\end{array}\right)}",
      r"\boxed{\left|\begin{array}{cc}1&2\\3&4\end{array}\right|}"]),
    (r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", [r"\boxed{\begin{vmatrix}1&2\\3&4\end{vmatrix}}"],
     [r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}"]),
    ("3:2", ["3:2", "6:4"], ["2:3"]),
    (r"-\infty", ["-\u221e", r"\boxed{-\infty}"], ["\u221e", r"\boxed{\infty}", "0"]),
    ("$10-3$", ["7", r"\boxed{10 - 3}"], ["10", "13", "-7"]),
    (r"5\sqrt{2}\text{ cm}", [r"\boxed{5\sqrt{2}}", r"\sqrt{50}\text{ cm}", "5\u221a2 cm"],
     [r"\boxed{5\sqrt{3}}", r"\sqrt{50}\text{ m}", r"5\text{ cm}", r"\boxed{5\sqrt{2}\text{ cm}^2}"]),
    (r"16\pi \text{ cm}^2", [r"16\pi", r"\boxed{16\pi\text{ cm}^2}", "16\u03c0 square centimeters"],
     [r"61\pi", r"16\pi\text{ cm}", "16", r"\boxed{16\text{ cm}^2}"]),
    (r"\frac{\pi}{3}\text{ radians}", [r"\boxed{\frac{\pi}{3}}", r"\boxed{\frac{2\pi}{6}\text{ radians}}"],
     [r"\boxed{\frac{\pi}{6}}", r"\boxed{60}", r"\boxed{\frac{\pi}{3}\text{ degrees}}"]),
    (r"2\pi h", [r"\boxed{h \cdot 2\pi}"], [r"\boxed{2\pi}"]), (r"2\pi hr", [r"\boxed{2\pi rh}"], [r"\boxed{2\pi}"]),
    (r"4\pi r^2\text{ cm}^2", [r"\boxed{4\pi r^2\text{ cm}^2}"], [r"\boxed{4\pi}"]),
    (r"2x\text{ cm}", [r"\boxed{2x\text{ cm}}"], ["2", "2 cm"]),
    (r"2^{16}", ["65,536", r"\boxed{65,536}", "The answer is 65,536."], ["65,537", "65, 536", "65", "655,36"]),
    ("9!", ["362,880"], ["362,88", "362,881"]), (r"1000\pi", [r"1,000\pi"], [r"1,\pi", "1,000"]),
    (r"\sqrt[3]{10}", [r"\boxed{10^{1/3}}", r"\boxed{\sqrt[3]{10}}"], [r"\boxed{\sqrt{10}}", r"\boxed{3\sqrt{10}}"]),
    (r"\log_2 3", [r"\boxed{\log_2 3}", r"\boxed{\frac{\ln 3}{\ln 2}}"], [r"\boxed{\log_3 2}", r"\boxed{\log 3}", "3"]),
    ("3 + 4i", [r"\boxed{4i + 3}", "3+4i"], [r"\boxed{3 - 4i}", r"\boxed{4 + 3i}", r"\boxed{7}", r"\boxed{5}"]),
]
TIMES = [
    ("7:45 AM", ["7:45 AM", "7:45 a.m.", r"\boxed{7:45 \text{ AM}}", "It is 7:45 AM."],
     ["7:45 PM", "7:54 AM", "45", "8:45 AM"]),
    ("7 pm", ["7 pm", "7:00 PM", "19:00"], ["7 am", "7"]),
    ("16:20", ["16:20", "4:20 PM"], ["4:20 AM", "16:02", "20", "16"]),
]
LABELS = [
    ("18", ["**Answer:** $18", r"**Final Answer:** \( 18 \)", "**Answer: $18**", "**The answer is $18.**",
      "*Answer:* 18", "The answer is **18** apples.", "**Answer: $18**. So it is.", "__Answer:__ 18"],
     ["**Answer:** $19", "**Answer: $1.8**", "**Answer:** -18"]),
    ("1/3", ["**Answer: 0.333...**", "Answer: 0.333..."], ["**Answer: 0.333**"]),
    ("0.5", ["**Answer:** .5"], ["**Answer:** 5"]), ("23", ["**Answer:** 23"], ["Answer: 2**3", "**Answer:** 2 ** 3"]),
    (r"\frac12", [r"**The answer is $\frac12$.**"], [r"**The answer is $\frac13$.**"]),
    ("yes", ["**Answer:** Yes", "**Answer: Yes**"], ["**Answer:** No"]),
    ("2, 3", ["**Answer:** 2, 3"], ["**Answer:** 2, 4"]), ("x > 3", ["**Answer:** x > 3"], ["**Answer:** x < 3"]),
    ("(1, 2)", ["**Answer:** (1, 2)"], ["**Answer:** (2, 1)"]),
    ("2x+3", ["**Answer:**\n$2x+3$", "The answer is **2x + 3**, since 2 > 1", "**Answer: $2x+3$**"],
     ["**Answer:**\n$2x$"]), ("x^2", ["Answer: x**2"], ["**Answer: x2**", "**Answer: 2x**"]),
    ("Paris", ["**Answer**: Paris", "**Answer:** Paris.", "**Answer: Paris.**"],
     ["**Answer**: Rome", "**Answer**: Paris, Texas"]),
    ("B", ["**Answer:** B", "**Answer: (B)**"], ["**Answer:** C"]),
    ("U.S.", ["**Answer:** U.S."], ["**Answer:** U.K."]),
]
THOUGHTS = [
    ("31", ["<think>Is it \\boxed{30}?</think>\\boxed{31}", "maybe 30</think>31", "<think>30</think>The answer is 31."],
     ["<think>\\boxed{31}</think>", "<think>31</think>\\boxed{30}", "<think>The answer is \\boxed{31}",
      "<think>a</think>\\boxed{30}<think>b</think>I give up."]),
    ("Rome", ["<think>Paris? No.</think>Rome"], ["<think>Rome</think>Paris", "<think>The answer is Rome.</think>"]),
]

TABLES = {
    "number": NUMBER, "size": SIZES, "percentage": PERCENT, "number words": WORDED, "grouped digits": GROUPED,
    "mixed number": MIXED, "periodic decimal": PERIODIC, "base": BASES, "number with unit": UNITS, "choice": CHOICE,
    "name": NAMES, "yes or no": YES_NO, "word": WORD, "product": PRODUCT, "list": LISTS, "set": SETS,
    "interval": INTERVALS, "tuple": TUPLES, "equation": EQUATIONS, "expression": EXPRESSIONS, "time": TIMES,
    "label": LABELS, "notation": NOTATIONS, "thoughts": THOUGHTS,
}
# fmt: on
PAIRS = [
    (gold, turn, is_right)
    for table in TABLES.values()
    for gold, right, wrong in table
    for turns, is_right in ((right, True), (wrong, False))
    for turn in turns
]


def test_the_pairs_are_graded_as_worked_by_hand():
    assert [
        (gold, turn) for gold, turn, is_right in PAIRS if (graded(gold, turn, deadline_s=20.0).grade or 0.0) != is_right
    ] == []
