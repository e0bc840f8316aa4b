// Explains a picture with an explained ONNX file: prints the likeliest classes and the map.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "contract.hpp"
#include "model.hpp"
#include "picture.hpp"

namespace {

const char* const kUsage =
    "MODEL.onnx PICTURE.ppm [--target CLASS] [--method NAME]... [--top N] [--pgm FILE]; "
    "or --version";
const std::string kMap = "map.", kHeatmap = "heatmap.";

// What the user asked for cannot be done.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Arguments {
  std::string model, picture, pgm;
  std::optional<std::int64_t> target;
  std::vector<std::string> methods;
  std::int64_t top = 5;
};

std::int64_t whole_number(const std::string& option, const std::string& text) {
  char* end = nullptr;
  const auto value = std::strtoll(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || value < 0) {
    throw UsageError(option + " " + text + ": expected a whole number from 0 on");
  }
  return value;
}

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  std::vector<std::string> files;
  for (std::size_t i = 0; i < words.size(); ++i) {
    const auto& word = words[i];
    if (word.rfind("--", 0) != 0) {
      files.push_back(word);
      continue;
    }
    if (i + 1 == words.size()) throw UsageError(word + ": expected a value after it");
    const auto& value = words[++i];
    if (word == "--target") {
      arguments.target = whole_number(word, value);
    } else if (word == "--method") {
      arguments.methods.push_back(value);
    } else if (word == "--top") {
      arguments.top = whole_number(word, value);
    } else if (word == "--pgm") {
      arguments.pgm = value;
    } else {
      throw UsageError("unknown option " + word + "; usage: " + kUsage);
    }
  }
  if (files.size() != 2) throw UsageError(std::string("usage: ") + kUsage);
  arguments.model = files[0];
  arguments.picture = files[1];
  return arguments;
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// The outputs to fetch: map.{method} for each method, and heatmap.{method} for a picture of it.
std::vector<std::string> chosen_outputs(const Model& model, Arguments& arguments) {
  std::string served;
  for (const auto& name : model.outputs()) {
    if (name.rfind(kMap, 0) != 0) continue;
    if (served.empty() && arguments.methods.empty()) {
      arguments.methods.push_back(name.substr(kMap.size()));
    }
    served += (served.empty() ? "" : ", ") + name.substr(kMap.size());
  }
  if (served.empty()) throw UsageError("the file has no maps; export it with --outputs maps");
  std::vector<std::string> outputs;
  for (const auto& method : arguments.methods) {
    if (!contains(model.outputs(), kMap + method)) {
      throw UsageError("the file has no map of " + method + "; it has " + served);
    }
    outputs.push_back(kMap + method);
  }
  if (!arguments.pgm.empty()) {
    if (arguments.methods.size() > 1) throw UsageError("--pgm takes one method");
    outputs.push_back(kHeatmap + arguments.methods[0]);
    if (!contains(model.outputs(), outputs.back())) {
      throw UsageError("the file has no heatmaps; export it with --heatmap");
    }
  }
  return outputs;
}

// The picture as the model takes it: as it is, or of the model's size and normalised here.
Input image_input(const Contract& contract, const Picture& picture) {
  if (contract.layout == "HWC") return {{picture.height, picture.width, 3}, picture.rgb};
  const auto [height, width] = contract.size;
  if (picture.height != height || picture.width != width) {
    const auto size = [](auto h, auto w) { return std::to_string(w) + "x" + std::to_string(h); };
    throw std::runtime_error("the picture has " + size(picture.height, picture.width) +
                             " pixels, the model takes " + size(height, width) +
                             "; resize it, or export with --embed-preprocessing");
  }
  const std::size_t pixels = static_cast<std::size_t>(height * width);
  std::vector<float> values(3 * pixels);
  const bool last = contract.layout == "NHWC";
  for (std::size_t channel = 0; channel < 3; ++channel) {
    const double mean = contract.mean[channel], scale = contract.std[channel];
    const std::size_t from = contract.bgr ? 2 - channel : channel;
    for (std::size_t i = 0; i < pixels; ++i) {
      const double value = (picture.rgb[3 * i + from] / 255.0 - mean) / scale;
      values[last ? 3 * i + channel : channel * pixels + i] = static_cast<float>(value);
    }
  }
  const Shape shape = last ? Shape{1, height, width, 3} : Shape{1, 3, height, width};
  return {shape, std::move(values)};
}

void print_classes(const Contract& contract, const Output& logits, std::int64_t top) {
  const auto& values = logits.data;
  const float largest = *std::max_element(values.begin(), values.end());
  const double total = std::accumulate(
      values.begin(), values.end(), 0.0,
      [largest](double sum, float value) { return sum + std::exp(double(value) - largest); });
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  order.resize(std::min(order.size(), static_cast<std::size_t>(top)));
  std::puts("share  logit        class");
  for (const auto index : order) {
    std::printf("%.4f %-12.6g %zu %s\n", std::exp(double(values[index]) - largest) / total,
                double(values[index]), index,
                index < contract.labels.size() ? contract.labels[index].c_str() : "");
  }
}

// Of [1, rows, columns].
std::pair<std::int64_t, std::int64_t> rows_and_columns(const std::string& name,
                                                       const Shape& shape) {
  if (shape.size() != 3 || shape[0] != 1) {
    throw std::runtime_error(name + " is not one map; make the file again");
  }
  return {shape[1], shape[2]};
}

void print_map(const std::string& name, const Output& map) {
  const auto [rows, columns] = rows_and_columns(name, map.shape);
  std::printf("%s, %lld rows of %lld\n", name.c_str(), static_cast<long long>(rows),
              static_cast<long long>(columns));
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const char end = (i + 1) % columns ? ' ' : '\n';
    std::printf("%12.5e%c", double(map.data[static_cast<std::size_t>(i)]), end);
  }
}

void explain(Arguments arguments) {
  const auto picture = read_ppm(arguments.picture);
  if (!std::ifstream(arguments.model)) {  // OpenVINO's own words for it are many
    throw std::runtime_error(arguments.model + ": cannot be opened");
  }
  const auto model = load(arguments.model);
  const auto text = model->contract();
  if (text.empty()) throw UsageError(arguments.model + ": not a file that onnxplain made");
  const auto contract = Contract::parse(text);
  if (contract.targets != 1) {
    throw UsageError("the file explains " + std::to_string(contract.targets) +
                     " classes at once; export it without --targets");
  }
  const auto maps = chosen_outputs(*model, arguments);
  std::map<std::string, Input> inputs{{contract.input, image_input(contract, picture)}};
  if (arguments.target.value_or(0) >= contract.classes) {
    throw UsageError("--target " + std::to_string(*arguments.target) + ": the model has " +
                     std::to_string(contract.classes) + " classes");
  }
  if (!contract.target.empty()) {  // -1: the class that the model predicts
    inputs[contract.target] = {{1}, std::vector<std::int64_t>{arguments.target.value_or(-1)}};
  }
  auto outputs = maps;
  outputs.push_back(contract.logits);
  const auto values = model->run(std::move(inputs), outputs);
  print_classes(contract, values.at(contract.logits), arguments.top);
  for (const auto& name : maps) {
    if (name.rfind(kMap, 0) == 0) {
      print_map(name, values.at(name));
    } else {
      const auto [rows, columns] = rows_and_columns(name, values.at(name).shape);
      write_pgm(arguments.pgm, values.at(name), rows, columns);
    }
  }
}

}  // namespace

// Exit status: 0 done; 1 the picture or the model cannot be used; 2 wrong usage.
int main(int count, char** words) {
  try {
    const std::vector<std::string> arguments(words + 1, words + count);
    if (arguments == std::vector<std::string>{"--version"}) {
      std::puts(runtime().c_str());
    } else {
      explain(parse(arguments));
    }
    return 0;
  } catch (const std::exception& error) {
    std::string message = error.what();
    std::replace(message.begin(), message.end(), '\n', ' ');
    std::fprintf(stderr, "error: %s\n", message.c_str());
    return dynamic_cast<const UsageError*>(&error) != nullptr ? 2 : 1;
  }
}
