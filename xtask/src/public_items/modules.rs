//! The modules of a library as its sources declare them, macros expanded, and what a path in one of them means.

use super::macros::Rules;
use crate::workspace::Workspace;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, HashMap};
use syn::{Attribute, Item, UseTree, Visibility};

/// Module path from the library's root, which is empty.
pub(super) type ModulePath = Vec<String>;

/// A module with what it declares.
#[derive(Default)]
pub(super) struct Module {
    /// Items, in the order of the sources.
    pub(super) items: Vec<Item>,
    /// `use` declarations: the name that each gives (`None` for `*`), its path, and whether it is public.
    pub(super) imports: Vec<Import>,
}

/// One name of a `use` declaration.
pub(super) struct Import {
    /// The name in this module; `None` for `*`.
    pub(super) name: Option<String>,
    pub(super) path: Vec<String>,
    pub(super) public: bool,
    pub(super) attributes: Vec<Attribute>,
}

/// What a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// A module of this library.
    Module(ModulePath),
    /// An item of this library, by its module and name.
    Item(ModulePath, String),
    /// Something of another crate.
    Foreign(Vec<String>),
}

/// All modules of one library.
pub(super) struct Library {
    pub(super) modules: BTreeMap<ModulePath, Module>,
}

impl Library {
    /// Reads the library of the member in `dir`.
    pub(super) fn read(workspace: &Workspace, dir: &str) -> Result<Self> {
        let prefix = format!("{dir}/src/");
        let files: HashMap<&str, &syn::File> = workspace
            .rust
            .iter()
            .filter_map(|f| Some((f.path.strip_prefix(&prefix)?, &f.tree)))
            .collect();
        let mut reader = Reader {
            files,
            macros: HashMap::new(),
            modules: BTreeMap::new(),
        };
        let root = reader.file("lib.rs")?;
        reader.module(Vec::new(), "", root)?;
        Ok(Self {
            modules: reader.modules,
        })
    }

    /// What `path`, written in module `from`, leads to.
    pub(super) fn resolve(&self, from: &ModulePath, path: &[String]) -> Result<Target> {
        self.resolve_within(from, path, 0)
    }

    fn resolve_within(&self, from: &ModulePath, path: &[String], depth: usize) -> Result<Target> {
        if depth > 32 {
            bail!("`{}` leads in a circle", path.join("::"));
        }
        let (first, rest) = path.split_first().context("an empty path")?;
        let mut at = match first.as_str() {
            "crate" => Target::Module(Vec::new()),
            "self" => Target::Module(from.clone()),
            "super" => Target::Module(from[..from.len().saturating_sub(1)].to_vec()),
            name => match self.member(from, name, depth)? {
                Some(target) => target,
                None => return Ok(Target::Foreign(path.to_vec())),
            },
        };
        for name in rest {
            at = match at {
                Target::Module(module) if name == "super" => {
                    Target::Module(module[..module.len().saturating_sub(1)].to_vec())
                }
                Target::Module(module) => self
                    .member(&module, name, depth)?
                    .with_context(|| format!("`{}`: no `{name}`", path.join("::")))?,
                // A variant or an associated item.
                Target::Item(..) => return Ok(at),
                Target::Foreign(mut outside) => {
                    outside.push(name.clone());
                    Target::Foreign(outside)
                }
            };
        }
        Ok(at)
    }

    /// What `name` is in `module`: declared there, or imported by name, or by `*`.
    fn member(&self, module: &ModulePath, name: &str, depth: usize) -> Result<Option<Target>> {
        let declared = self
            .modules
            .get(module)
            .context("a module of another crate")?;
        let mut child = module.clone();
        child.push(name.to_owned());
        if self.modules.contains_key(&child) {
            return Ok(Some(Target::Module(child)));
        }
        if declared
            .items
            .iter()
            .any(|i| item_name(i).as_deref() == Some(name))
        {
            return Ok(Some(Target::Item(module.clone(), name.to_owned())));
        }
        for import in &declared.imports {
            // `use lora_x::y` in a crate that has no module `lora_x` is another crate's.
            if import.name.as_deref() == Some(name) && import.path[0] != name {
                return self
                    .resolve_within(module, &import.path, depth + 1)
                    .map(Some);
            }
            if import.name.as_deref() == Some(name) {
                return Ok(Some(Target::Foreign(import.path.clone())));
            }
        }
        for import in declared.imports.iter().filter(|i| i.name.is_none()) {
            if let Target::Module(other) = self.resolve_within(module, &import.path, depth + 1)?
                && other != *module
                && let Some(found) = self.member(&other, name, depth + 1)?
            {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// The name of a declaration; `None` for what declares none.
pub(super) fn item_name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(i) => &i.ident,
        Item::Enum(i) => &i.ident,
        Item::Fn(i) => &i.sig.ident,
        Item::Static(i) => &i.ident,
        Item::Struct(i) => &i.ident,
        Item::Trait(i) => &i.ident,
        Item::Type(i) => &i.ident,
        Item::Union(i) => &i.ident,
        Item::Mod(i) => &i.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Whether an item is compiled for tests only.
pub(super) fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && matches!(&attribute.meta, syn::Meta::List(l) if l.tokens.to_string() == "test")
    })
}

struct Reader<'a> {
    files: HashMap<&'a str, &'a syn::File>,
    macros: HashMap<String, Rules>,
    modules: BTreeMap<ModulePath, Module>,
}

impl<'a> Reader<'a> {
    fn file(&self, path: &str) -> Result<Vec<Item>> {
        let file = self
            .files
            .get(path)
            .with_context(|| format!("no file {path}"))?;
        Ok(file.items.clone())
    }

    /// Reads a module whose child files lie in `dir` (empty, or with a trailing slash).
    fn module(&mut self, path: ModulePath, dir: &str, items: Vec<Item>) -> Result<()> {
        let mut module = Module::default();
        for item in self.expanded(items)? {
            match item {
                Item::Mod(declared) if is_test_only(&declared.attrs) => {}
                Item::Mod(declared) => {
                    let name = declared.ident.to_string();
                    let mut child = path.clone();
                    child.push(name.clone());
                    let inner = match &declared.content {
                        Some((_, items)) => items.clone(),
                        None => self
                            .file(&format!("{dir}{name}.rs"))
                            .or_else(|_| self.file(&format!("{dir}{name}/mod.rs")))?,
                    };
                    self.module(child, &format!("{dir}{name}/"), inner)?;
                    module.items.push(Item::Mod(declared));
                }
                Item::Use(declared) => {
                    let mut imports = Vec::new();
                    flatten(&declared.tree, &mut Vec::new(), &mut imports);
                    let public = matches!(declared.vis, Visibility::Public(_));
                    module
                        .imports
                        .extend(imports.into_iter().map(|(name, path)| Import {
                            name,
                            path,
                            public,
                            attributes: declared.attrs.clone(),
                        }));
                }
                other => module.items.push(other),
            }
        }
        self.modules.insert(path, module);
        Ok(())
    }

    /// `items` with what macros write in their place, in impls too.
    fn expanded(&mut self, items: Vec<Item>) -> Result<Vec<Item>> {
        let mut found = Vec::new();
        for item in items {
            match item {
                Item::Macro(declared) if declared.ident.is_some() => {
                    let name = declared
                        .ident
                        .as_ref()
                        .map(ToString::to_string)
                        .unwrap_or_default();
                    // Macros of expressions may have any shape: what cannot be read matters where it writes items.
                    if let Ok(rules) = Rules::parse(&name, &declared.mac.tokens) {
                        self.macros.insert(name, rules);
                    }
                }
                Item::Macro(call) if is_test_only(&call.attrs) => {}
                Item::Macro(call) => {
                    let Some(tokens) = self.expansion(&call.mac)? else {
                        continue;
                    };
                    let file: syn::File = syn::parse2(tokens)?;
                    found.extend(self.expanded(file.items)?);
                }
                Item::Impl(mut block) => {
                    block.items = self.impl_items(block.items)?;
                    found.push(Item::Impl(block));
                }
                other => found.push(other),
            }
        }
        Ok(found)
    }

    fn impl_items(&self, items: Vec<syn::ImplItem>) -> Result<Vec<syn::ImplItem>> {
        let mut found = Vec::new();
        for item in items {
            let syn::ImplItem::Macro(call) = &item else {
                found.push(item);
                continue;
            };
            if let Some(tokens) = self.expansion(&call.mac)? {
                let parser = |input: syn::parse::ParseStream<'_>| {
                    let mut items = Vec::new();
                    while !input.is_empty() {
                        items.push(input.parse()?);
                    }
                    Ok(items)
                };
                found.extend(syn::parse::Parser::parse2(parser, tokens)?);
            }
        }
        Ok(found)
    }

    /// What a call of one of the library's own macros stands for; `None` for another crate's, which write no item that is public.
    fn expansion(&self, call: &syn::Macro) -> Result<Option<proc_macro2::TokenStream>> {
        const WITHOUT_ITEMS: [&str; 3] = ["thread_local", "static_assertions", "compile_error"];
        let path: Vec<String> = call
            .path
            .segments
            .iter()
            .map(|s| s.ident.to_string())
            .collect();
        let name = path.join("::");
        match self.macros.get(&name) {
            Some(rules) => rules.expand(&name, &call.tokens).map(Some),
            None if WITHOUT_ITEMS.contains(&name.as_str()) => Ok(None),
            None => bail!("macro {name} stands where items do and cannot be read"),
        }
    }
}

/// The names that a `use` tree gives and where they come from.
fn flatten(
    tree: &UseTree,
    prefix: &mut Vec<String>,
    found: &mut Vec<(Option<String>, Vec<String>)>,
) {
    match tree {
        UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten(&path.tree, prefix, found);
            prefix.pop();
        }
        UseTree::Name(name) if name.ident == "self" => {
            found.push((prefix.last().cloned(), prefix.clone()));
        }
        UseTree::Name(name) => {
            let mut path = prefix.clone();
            path.push(name.ident.to_string());
            found.push((Some(name.ident.to_string()), path));
        }
        UseTree::Rename(rename) => {
            let mut path = prefix.clone();
            if rename.ident != "self" {
                path.push(rename.ident.to_string());
            }
            found.push((Some(rename.rename.to_string()), path));
        }
        UseTree::Glob(_) => found.push((None, prefix.clone())),
        UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, prefix, found);
            }
        }
    }
}
