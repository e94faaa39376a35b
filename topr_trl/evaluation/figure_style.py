"""Define the colors and the look of figures, so that a color has one meaning on all pages.

The colors are Okabe and Ito's palette for color-blind readers. Figures have no background, and gray text can be read
on light and on dark pages.
"""

GRAY = "#7a7a7a"
POSITIVE, NEGATIVE, NEITHER = "#009e73", "#d55e00", "#999999"  # right answers, wrong answers, no answer or reward
TOPR = "#0072b2"
SEGMENT, PREFIX = "#e69f00", "#56b4e9"  # a ratio per segment, and a ratio per prefix
RUNS = ("#cc79a7", TOPR, SEGMENT, PREFIX)  # before training, after training, and other runs

LOOK = {
    "axes.edgecolor": GRAY, "axes.labelcolor": GRAY, "axes.titlecolor": GRAY, "axes.titlesize": 10, "font.size": 9,
    "grid.color": f"{GRAY}40", "legend.frameon": False, "savefig.transparent": True, "text.color": GRAY,
    "xtick.color": GRAY, "ytick.color": GRAY,
}  # fmt: skip
WIDTH, DPI = 5.4, 160  # inches, and dots per inch; at this width, text can be read on a phone
