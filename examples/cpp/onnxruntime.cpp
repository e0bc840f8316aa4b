#include <onnxruntime_cxx_api.h>

#include "model.hpp"

namespace {

class OnnxRuntime : public Model {
 public:
  explicit OnnxRuntime(const std::string& path)
      : environment_(ORT_LOGGING_LEVEL_ERROR), session_(environment_, path.c_str(), {}) {}

  std::string contract() const override {
    const auto value =
        session_.GetModelMetadata().LookupCustomMetadataMapAllocated("onnxplain", allocator_);
    return value ? value.get() : "";
  }

  std::vector<std::string> outputs() const override {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < session_.GetOutputCount(); ++i) {
      names.emplace_back(session_.GetOutputNameAllocated(i, allocator_).get());
    }
    return names;
  }

  std::map<std::string, Output> run(std::map<std::string, Input> inputs,
                                    const std::vector<std::string>& outputs) override {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<const char*> input_names, output_names;
    std::vector<Ort::Value> given;
    for (auto& [name, input] : inputs) {
      input_names.push_back(name.c_str());
      std::visit(
          [&, &shape = input.shape](auto& data) {
            given.push_back(Ort::Value::CreateTensor(memory, data.data(), data.size(),
                                                     shape.data(), shape.size()));
          },
          input.data);
    }
    for (const auto& name : outputs) output_names.push_back(name.c_str());
    auto values = session_.Run({}, input_names.data(), given.data(), given.size(),
                               output_names.data(), output_names.size());
    std::map<std::string, Output> found;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const auto info = values[i].GetTensorTypeAndShapeInfo();
      const auto* data = values[i].GetTensorData<float>();
      found[outputs[i]] = {info.GetShape(), {data, data + info.GetElementCount()}};
    }
    return found;
  }

 private:
  mutable Ort::AllocatorWithDefaultOptions allocator_;
  Ort::Env environment_;
  Ort::Session session_;
};

}  // namespace

std::unique_ptr<Model> load(const std::string& path) { return std::make_unique<OnnxRuntime>(path); }

std::string runtime() { return "onnxruntime " + Ort::GetVersionString(); }
