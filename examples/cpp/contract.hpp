#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// What the example needs of the JSON document in an explained file's metadata.
struct Contract {
  std::string input, logits;
  std::string layout;  // of the input: NCHW, NHWC, or HWC for a picture as it is
  std::string target;  // empty: no output depends on the class
  bool bgr = false;
  std::array<std::int64_t, 2> size{};  // height, width
  std::array<double, 3> mean{}, std{};
  std::int64_t classes = 0;
  std::int64_t targets = 1;  // so many classes of a picture are explained at once
  std::vector<std::string> labels;  // empty: there are none

  // Throws std::runtime_error where a field is missing.
  static Contract parse(const std::string& json);
};
