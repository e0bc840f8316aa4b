#include "picture.hpp"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <limits>
#include <stdexcept>

namespace {

std::int64_t read_number(std::istream& file, const std::string& path) {
  while (std::isspace(file.peek()) || file.peek() == '#') {
    if (file.get() == '#') file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  std::int64_t number = 0;
  if (!(file >> number) || number < 1 || number > 65535) {
    throw std::runtime_error(path + ": the header of a PPM picture is damaged");
  }
  return number;
}

}  // namespace

Picture read_ppm(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + ": cannot be opened");
  if (file.get() != 'P' || file.get() != '6') {
    throw std::runtime_error(path +
                             ": not a binary PPM picture (P6); README.md says how to make one");
  }
  Picture picture;
  picture.width = read_number(file, path);
  picture.height = read_number(file, path);
  if (const auto largest = read_number(file, path); largest != 255) {
    throw std::runtime_error(path + ": values up to " + std::to_string(largest) + ", expected 255");
  }
  file.get();  // the one white space before the pixels
  picture.rgb.resize(static_cast<std::size_t>(picture.width * picture.height * 3));
  const auto size = static_cast<std::streamsize>(picture.rgb.size());
  if (!file.read(reinterpret_cast<char*>(picture.rgb.data()), size)) {
    throw std::runtime_error(path + ": " + std::to_string(file.gcount()) +
                             " bytes of pixels, expected " + std::to_string(size));
  }
  return picture;
}

void write_pgm(const std::string& path, const Output& values, std::int64_t rows,
               std::int64_t columns) {
  std::ofstream file(path, std::ios::binary);
  file << "P5\n" << columns << ' ' << rows << "\n255\n";
  for (const float value : values.data) {
    file.put(static_cast<char>(std::lround(255 * std::clamp(value, 0.0F, 1.0F))));
  }
  if (!file.flush()) throw std::runtime_error(path + ": cannot be written");
}
