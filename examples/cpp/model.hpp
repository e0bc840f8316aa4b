// What a runtime has to do for the example: openvino.cpp and onnxruntime.cpp do it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

using Shape = std::vector<std::int64_t>;

struct Input {
  Shape shape;
  std::variant<std::vector<float>, std::vector<std::uint8_t>, std::vector<std::int64_t>> data;
};

struct Output {
  Shape shape;
  std::vector<float> data;
};

class Model {
 public:
  virtual ~Model() = default;
  // The model's metadata under the key "onnxplain"; empty where there is none.
  virtual std::string contract() const = 0;
  virtual std::vector<std::string> outputs() const = 0;
  // Inputs that have a default value may be left out.
  virtual std::map<std::string, Output> run(std::map<std::string, Input> inputs,
                                            const std::vector<std::string>& outputs) = 0;
};

// Throws std::exception where the file cannot be read as a model.
std::unique_ptr<Model> load(const std::string& path);

// Name and version of the runtime.
std::string runtime();
