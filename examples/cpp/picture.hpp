#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.hpp"

// Rows of pixels, red green blue each.
struct Picture {
  std::int64_t width = 0, height = 0;
  std::vector<std::uint8_t> rgb;
};

// Reads a binary PPM ("P6", 8 bits a channel). Throws std::runtime_error where it is not one.
Picture read_ppm(const std::string& path);

// Writes rows x columns values of 0..1 as a grey picture. Throws std::runtime_error.
void write_pgm(const std::string& path, const Output& values, std::int64_t rows,
               std::int64_t columns);
