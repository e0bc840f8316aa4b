#include <openvino/op/constant.hpp>
#include <openvino/op/parameter.hpp>
#include <openvino/openvino.hpp>

#include "model.hpp"

namespace {

class OpenVino : public Model {
 public:
  explicit OpenVino(const std::string& path) : model_(core_.read_model(path)) {}

  std::string contract() const override {
    if (!model_->has_rt_info("framework", "onnxplain")) return "";
    return model_->get_rt_info<std::string>("framework", "onnxplain");
  }

  std::vector<std::string> outputs() const override {
    std::vector<std::string> names;
    for (const auto& output : model_->outputs()) names.push_back(output.get_any_name());
    return names;
  }

  std::map<std::string, Output> run(std::map<std::string, Input> inputs,
                                    const std::vector<std::string>& outputs) override {
    for (const auto& [name, input] : inputs) make_input(name, input.shape);
    // Where the processor has bfloat16, it is the default: too coarse for gradients.
    const auto precision = ov::hint::inference_precision(ov::element::f32);
    auto request = core_.compile_model(model_, "CPU", precision).create_infer_request();
    for (auto& [name, input] : inputs) {
      std::visit(
          [&, &name = name, &shape = input.shape](auto& data) {
            using Element = typename std::decay_t<decltype(data)>::value_type;
            const ov::Shape sizes(shape.begin(), shape.end());
            request.set_tensor(name, {ov::element::from<Element>(), sizes, data.data()});
          },
          input.data);
    }
    request.infer();
    std::map<std::string, Output> found;
    for (const auto& name : outputs) {
      const auto tensor = request.get_tensor(name);
      const auto* data = tensor.data<float>();
      const auto& shape = tensor.get_shape();
      found[name] = {Shape(shape.begin(), shape.end()), {data, data + tensor.get_size()}};
    }
    return found;
  }

 private:
  // OpenVINO reads an input with a default value as a constant, which this makes an input again.
  void make_input(const std::string& name, const Shape& shape) {
    for (const auto& node : model_->get_ordered_ops()) {
      if (node->get_friendly_name() != name || !ov::is_type<ov::op::v0::Constant>(node)) continue;
      const auto input = std::make_shared<ov::op::v0::Parameter>(
          node->get_output_element_type(0), ov::PartialShape::dynamic(shape.size()));
      input->output(0).set_names({name});
      node->output(0).replace(input->output(0));
      model_->add_parameters({input});
      model_->validate_nodes_and_infer_types();
    }
  }

  ov::Core core_;
  std::shared_ptr<ov::Model> model_;
};

}  // namespace

std::unique_ptr<Model> load(const std::string& path) { return std::make_unique<OpenVino>(path); }

std::string runtime() { return std::string("OpenVINO ") + ov::get_openvino_version().buildNumber; }
