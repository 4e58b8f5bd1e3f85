//! Serves a model with several adapters at once and prints what became of each request.

#![forbid(unsafe_code)]

use clap::{Parser, ValueEnum};
use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use lora_runtime::config::BackendKind;
use lora_runtime::weights::BASE_SLOT;
use mini_engine::recorded::relative_error;
use mini_engine::{Engine, EngineError, EngineOptions, Recorded, Request, Response};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Models and adapters to try it on, with what PEFT recorded of them.
const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/cases");

/// The adapters that are served where none is named.
const ADAPTERS: [&str; 4] = [
    "llama_plain",
    "llama_rslora",
    "llama_patterns",
    "llama_modules_to_save",
];

/// A small LLM engine that serves many LoRA adapters in one batch.
#[derive(Debug, Parser)]
struct Arguments {
    /// Where deltas run.
    #[arg(long, value_enum, default_value = "host")]
    backend: Backend,
    /// Model folder: config.json and safetensors.
    #[arg(long, default_value_os_t = Path::new(CASES).join("base_llama"))]
    model: PathBuf,
    /// Adapter folder, or a folder with one called `adapter` and perhaps PEFT's own logits beside it.
    #[arg(long = "adapter", value_name = "DIR", default_values_os_t = ADAPTERS.map(|case| Path::new(CASES).join(case)))]
    adapters: Vec<PathBuf>,
    /// Prompt as token ids, for adapters without recorded logits.
    #[arg(long, value_delimiter = ',', default_values_t = [5, 17, 3, 40])]
    prompt: Vec<u32>,
    /// Tokens to generate for each request.
    #[arg(long, default_value_t = 6)]
    tokens: usize,
    /// Adapters resident at once. Where there are more adapters, they take turns.
    #[arg(long, default_value_t = 2)]
    slots: u32,
    /// Largest rank of an adapter.
    #[arg(long, default_value_t = 16)]
    max_rank: u32,
    /// Rows of a step.
    #[arg(long, default_value_t = 16)]
    max_rows: u32,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Backend {
    Host,
    Cuda,
}

fn main() -> ExitCode {
    match demonstrate(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// An adapter with the prompts to try it on, and what PEFT gave for them.
struct Tried {
    name: String,
    folder: PathBuf,
    prompts: Vec<Vec<u32>>,
    recorded: Option<Recorded>,
}

impl Tried {
    fn open(folder: &Path, prompt: &[u32]) -> Result<Self, EngineError> {
        let recorded = Recorded::open(folder)?;
        let inner = folder.join("adapter");
        let name = folder.file_name().unwrap_or_default();
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            folder: if inner.is_dir() {
                inner
            } else {
                folder.to_owned()
            },
            prompts: match &recorded {
                Some(recorded) => recorded.prompts.clone(),
                None => vec![prompt.to_vec()],
            },
            recorded,
        })
    }

    /// A request for each prompt, of this adapter or of the base model.
    fn requests(&self, is_adapted: bool, max_tokens: usize) -> impl Iterator<Item = Request> {
        let prompts = self.prompts.iter().enumerate();
        prompts.map(move |(at, prompt)| Request {
            name: format!("{}/{at}", self.name),
            adapter: is_adapted.then(|| self.name.clone()),
            prompt: prompt.clone(),
            max_tokens,
            keep_logits: true,
        })
    }

    /// How far the answer to one of this adapter's requests lies from PEFT's.
    fn error(&self, response: &Response) -> Option<f32> {
        let request = &response.request;
        let recorded = self.recorded.as_ref()?;
        let logits = match request.adapter {
            Some(_) => &recorded.adapted,
            None => &recorded.base,
        };
        let number = request
            .name
            .strip_prefix(&self.name)?
            .strip_prefix('/')?
            .parse();
        let wanted = logits.get::<usize>(number.ok()?)?;
        request
            .keep_logits
            .then(|| relative_error(&response.logits, wanted))
    }
}

fn demonstrate(arguments: &Arguments) -> Result<(), EngineError> {
    let options = EngineOptions {
        backend: match arguments.backend {
            Backend::Host => BackendKind::Host,
            Backend::Cuda => BackendKind::Cuda,
        },
        slots: arguments.slots,
        max_rank: arguments.max_rank,
        max_rows: arguments.max_rows,
        cached_prompts: 64,
    };
    let mut engine = Engine::open(&arguments.model, options)?;
    let folders = arguments.adapters.iter();
    let tried = folders.map(|folder| Tried::open(folder, &arguments.prompt));
    let tried: Vec<Tried> = tried.collect::<Result<_, _>>()?;
    for adapter in &tried {
        engine.register(&adapter.name, &adapter.folder)?;
    }
    let device = engine.runtime().kernels().backend().caps();
    println!("deltas run on: {}", device.name);
    let (slots, tokens) = (arguments.slots, arguments.tokens);

    println!("\n1. The base model and every adapter at once, through {slots} slots:");
    let base = tried.iter().take(1);
    let base = base.flat_map(|adapter| adapter.requests(false, tokens));
    let adapted = tried
        .iter()
        .flat_map(|adapter| adapter.requests(true, tokens));
    serve(&mut engine, base.chain(adapted), &tried)?;

    println!(
        "\n2. Again, the last adapters first: those still in a slot start from the prefix cache:"
    );
    let again = tried.iter().rev();
    let again = again.flat_map(|adapter| adapter.requests(true, tokens).take(1));
    let cached = again.map(|request| Request {
        keep_logits: false,
        ..request
    });
    serve(&mut engine, cached, &tried)?;

    if let [first, .., last] = tried.as_slice() {
        println!(
            "\n3. The weights of {} under the name {}, one request before and one after:",
            last.name, first.name
        );
        let request = || first.requests(true, tokens).take(1);
        request().try_for_each(|request| engine.submit(request))?;
        engine.step()?;
        engine.register(&first.name, &last.folder)?;
        serve(&mut engine, request(), &tried[..0])?;
    }
    let metrics = engine.runtime().metrics();
    println!(
        "\n{} times an adapter was brought in, {} times in place of another",
        metrics.loads, metrics.evictions
    );
    Ok(())
}

/// Serves the requests: a line a step, then a table.
fn serve(
    engine: &mut Engine,
    mut requests: impl Iterator<Item = Request>,
    tried: &[Tried],
) -> Result<(), EngineError> {
    requests.try_for_each(|request| engine.submit(request))?;
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN).set_header([
        "request",
        "adapter",
        "slot",
        "prefix-cache key",
        "cached",
        "tokens",
        "off PEFT by",
    ]);
    for step in 1.. {
        if engine.is_idle() {
            break;
        }
        let responses = engine.step()?;
        println!("   step {step:2}: {}", rows_by_slot(engine.last_slots()));
        for response in responses {
            table.add_row(cells(&response, tried));
        }
    }
    println!("{table}");
    Ok(())
}

fn rows_by_slot(slots: &[i32]) -> String {
    let mut rows: BTreeMap<i32, usize> = BTreeMap::new();
    for slot in slots {
        *rows.entry(*slot).or_default() += 1;
    }
    let rows = rows
        .iter()
        .map(|(slot, rows)| format!("{} x{rows}", slot_name(*slot)));
    rows.collect::<Vec<_>>().join(", ")
}

fn cells(response: &Response, tried: &[Tried]) -> [String; 7] {
    let request = &response.request;
    let error = tried.iter().find_map(|adapter| adapter.error(response));
    let tokens: Vec<String> = response.tokens.iter().map(ToString::to_string).collect();
    [
        request.name.clone(),
        request
            .adapter
            .clone()
            .unwrap_or_else(|| "(base)".to_owned()),
        slot_name(response.slot),
        format!("{:016x}", response.adapter_id),
        response.cached_tokens.to_string(),
        tokens.join(" "),
        error.map_or_else(String::new, |error| format!("{:.2} %", error * 100.0)),
    ]
}

fn slot_name(slot: i32) -> String {
    match slot {
        BASE_SLOT => "base".to_owned(),
        slot => format!("slot {slot}"),
    }
}
