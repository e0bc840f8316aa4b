#include "contract.hpp"

#include <cstdlib>
#include <stdexcept>

namespace {

// Reads values by key. onnxplain writes `"key": value` with one space, and within a JSON string a
// quote has a backslash before it, so that `"key": ` is never found inside one.
class Reader {
 public:
  explicit Reader(const std::string& json) : json_(json) {}

  // Moves behind the next `"key": `.
  Reader& find(const std::string& key) {
    const auto sought = '"' + key + "\": ";
    const auto at = json_.find(sought, position_);
    if (at == std::string::npos) {
      throw std::runtime_error("the contract has no field \"" + key + "\"; make the file again");
    }
    position_ = at + sought.size();
    return *this;
  }

  // A string; empty for null.
  std::string text() {
    std::string value;
    if (!take('"')) return value;
    while (position_ < json_.size() && json_[position_] != '"') {
      value += json_[position_] == '\\' ? escaped() : json_[position_++];
    }
    ++position_;
    return value;
  }

  double number() {
    char* end = nullptr;
    const char* start = json_.c_str() + position_;
    const double value = std::strtod(start, &end);
    if (end == start) throw std::runtime_error("the contract is damaged; make the file again");
    position_ += static_cast<std::size_t>(end - start);
    return value;
  }

  // Whether the next character is this one, which is then passed.
  bool take(char expected) {
    if (position_ >= json_.size() || json_[position_] != expected) return false;
    ++position_;
    return true;
  }

  template <typename Values>
  void numbers(Values& values) {
    take('[');
    for (auto& value : values) {
      value = static_cast<typename Values::value_type>(number());
      separator();
    }
  }

  void separator() {
    if (take(',')) take(' ');
  }

 private:
  char escaped() {
    const char kind = json_[position_ + 1];
    position_ += 2;
    switch (kind) {
      case 'b': return '\b';
      case 'f': return '\f';
      case 'n': return '\n';
      case 'r': return '\r';
      case 't': return '\t';
      case 'u':  // control characters alone are written so
        position_ += 4;
        return static_cast<char>(std::stoi(json_.substr(position_ - 4, 4), nullptr, 16));
      default: return kind;
    }
  }

  const std::string& json_;
  std::size_t position_ = 0;
};

}  // namespace

Contract Contract::parse(const std::string& json) {
  const auto at = [&json](const std::string& key) { return Reader(json).find(key); };
  const auto of_input = [&json](const std::string& key) {
    return Reader(json).find("input").find(key);
  };
  Contract contract;
  contract.input = of_input("name").text();
  contract.layout = of_input("layout").text();
  of_input("size").numbers(contract.size);
  of_input("mean").numbers(contract.mean);
  of_input("std").numbers(contract.std);
  contract.bgr = of_input("color_order").text() == "BGR";
  contract.classes = static_cast<std::int64_t>(at("classes").number());
  contract.targets = static_cast<std::int64_t>(at("targets").number());
  contract.target = at("target").text();
  contract.logits = at("logits").text();
  auto labels = at("labels");
  if (labels.take('[')) {
    while (!labels.take(']')) {
      contract.labels.push_back(labels.text());
      labels.separator();
      if (contract.labels.size() > static_cast<std::size_t>(contract.classes)) {
        throw std::runtime_error("the contract's labels are damaged; make the file again");
      }
    }
  }
  return contract;
}
