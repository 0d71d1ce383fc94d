// Text, numbers and ticks for the command's pictures.
#pragma once

#include <string>
#include <vector>

namespace flashjit::command {

// Escapes a text for XML and HTML, between tags and in quotes.
std::string escaped(const std::string& text);

// A coordinate with at most two decimals, the same on every machine: "12", "12.5".
std::string coordinate(double value);

// Ticks of a linear axis from 0 to `most`: 0, step, 2 step, ..., the last of them `most` or more. The step is
// 1, 2 or 5 times a power of ten, and there are at most `count` steps.
std::vector<double> ticks(double most, int count);

// Ticks of a logarithmic axis: powers of ten in [least, most].
std::vector<double> powers_of_ten(double least, double most);
// A tick's label without trailing zeros: "0.01", "20".
std::string tick_label(double value);

// Breaks a text at separators into lines of at most `width` bytes. A longer piece has a line of its own.
std::vector<std::string> wrapped(const std::string& text, const std::string& separator, std::size_t width);

}  // namespace flashjit::command
