#!/usr/bin/env python3
"""What each operator makes of a line, and what is never changed; the list of planted defects fits the sources."""
import json
import pathlib
import unittest

from mutants import masked, mutants_by_line


def changed(text, operator):
    return {mutant.apply(text) for line in mutants_by_line(text).values() for mutant in line.get(operator, [])}


class Mutants(unittest.TestCase):
    def test_comparisons_turn(self):
        self.assertEqual(changed("if (a < b) f();", "comparison"), {"if (a <= b) f();"})
        self.assertEqual(changed("x = a == b;", "comparison"), {"x = a != b;"})
        self.assertEqual(changed("template <class T> f(Range<int> a);", "comparison"), set())

    def test_numbers_and_right_operands_are_off_by_one(self):
        self.assertEqual(changed("f(0x10u);", "off by one"), {"f(17u);", "f(15u);"})
        self.assertEqual(changed("f(0);", "off by one"), {"f(1);"})
        self.assertEqual(changed("x = a - b.c(d);", "off by one"), {"x = a - (b.c(d) + 1);", "x = a - (b.c(d) - 1);"})
        self.assertEqual(changed("x = 1.5f;", "off by one"), set())

    def test_operands_change_places(self):
        self.assertEqual(changed("x = a[i] - f(b, c)->d;", "swapped operands"),
                         {"x = f(b, c)->d - a[i];", "x = a[i] - f(c, b)->d;"})
        self.assertEqual(changed("return c ? a + 1 : b;", "swapped operands"), {"return c ? b : a + 1;"})
        self.assertEqual(changed("x = min(a, b);", "swapped operands"), set())
        self.assertEqual(changed("void f(int a, const T& b);", "swapped operands"), set())

    def test_branches_are_dropped(self):
        self.assertEqual(changed("if (a) f();", "dropped branch"), {"if (false && (a)) f();"})
        self.assertEqual(changed("if (int n = g(); n) f();", "dropped branch"), {"if (int n = g();false && (n)) f();"})
        self.assertEqual(changed("if (int n = g()) f();", "dropped branch"), set())
        self.assertEqual(changed("return a && b;", "dropped branch"), {"return b;", "return a;"})
        self.assertEqual(changed("return c ? a : b;", "dropped branch"), {"return b;"})

    def test_barriers_are_dropped(self):
        for call in ("__syncthreads();", "fence_proxy_async();", "wgmma_wait_group<1>();", "std::atomic_thread_fence(x);"):
            self.assertEqual(changed(f"f();\n  {call}\n", "dropped barrier"), {"f();\n  ;\n"})
        self.assertEqual(changed("f();\n  store(x);\n", "dropped barrier"), set())

    def test_comments_texts_and_messages_stay(self):
        for text in ("// a < b, 1", "/* 1 */", 's = "a < 1";', "c = '<';", "#if A < 1\n", "static_assert(a < 1);",
                     "refuse_argument(a - 1, b);", 's = R"(1 < 2)";'):
            self.assertEqual(mutants_by_line(text), {}, text)
            self.assertEqual(len(masked(text)), len(text))

    def test_planted_defects_have_a_place(self):
        folder = pathlib.Path(__file__).resolve().parent
        for item in json.loads((folder / "planted.json").read_text()):
            text = (folder.parents[1] / item["file"]).read_text()
            self.assertEqual(text.count(item["find"]), 1, item)
            self.assertNotEqual(item["find"], item["replace"], item)


if __name__ == "__main__":
    unittest.main()
